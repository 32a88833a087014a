"""Results as a pandas DataFrame, for notebooks: ``cosched.results(PATH)``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosched.errors import ConfigError
from cosched.lab.simulation.result_store import stored_results

if TYPE_CHECKING:
    import pandas as pd


def results(path: str | Path) -> pd.DataFrame:
    """One row per run, or per request.

    path  a folder that `--results` names: all runs in it; a file of JSON lines: what `simulate` and
          `bench run` print (a row per run), or what `--records` writes (a row per request)

    Columns are the keys of the JSON objects, nested ones joined by dots
    (``summary.online.tpot_s.p50``); units are in their names. Raises ConfigError when there is
    nothing to read, or no pandas.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("results need pandas: pip install 'cosched[results]'") from error
    path = Path(path)
    found = list(_stored(path) if path.is_dir() else _lines(path))
    if not found:
        raise ConfigError(f"{path} has no results")
    return pd.json_normalize(found)


def _stored(folder: Path) -> Iterator[dict[str, Any]]:
    for result in stored_results(folder):
        yield {"setting": result.spec.setting.name, **result.to_dict(with_host=True)}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that are no JSON object belong to a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: {error} in {line[:80]!r}") from error
