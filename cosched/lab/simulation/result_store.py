"""Results of runs on disk, so that an interrupted comparison continues where it stopped."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import cosched
import cosched_patches
import cosched_traces
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.run_spec import RunSpec
from cosched.policies import policy_entry

_FORMAT = 8

_IRRELEVANT = ("lab/benchmark", "lab/profiling")
"""Folders of cosched whose code has no part in the result of a run."""


class ResultStore:
    """One pickle per run, in a folder that only the user may write to.

    A result is valid for its exact specification, the versions of cosched and SGLang, and the
    source code that made it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = _source_digest()
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, spec: RunSpec) -> RunResult | None:
        """The result of an equal run, or None; an unreadable file counts as None. A complete run is
        also the result of the same run with a limit of misses."""
        for path in (self._path(replace(spec, most_misses=None)), self._path(spec)):
            result = _read(path)
            if result is not None:
                return replace(result, spec=spec)
        return None

    def put(self, result: RunResult) -> None:
        spec = result.spec if result.gave_up else replace(result.spec, most_misses=None)
        path = self._path(spec)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as file:
            pickle.dump(result, file, protocol=pickle.HIGHEST_PROTOCOL)
        partial.replace(path)

    def _path(self, spec: RunSpec) -> Path:
        policy = policy_entry(spec.setting.policy)
        decisive = replace(
            spec,
            setting=replace(spec.setting, summary=""),
            config=() if policy.make is None else spec.config,
        )
        versions = [metadata.version("cosched"), metadata.version("sglang")]
        key = [_FORMAT, *versions, decisive, self._source, _digest_of_file(policy.source_file)]
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        return self._folder / f"{spec.setting.name.replace('/', '-')}-{digest}.pickle"


def stored_results(folder: Path) -> Iterator[RunResult]:
    """All that can be read, of whatever code, by the name of their files."""
    for path in sorted(folder.glob("*.pickle")):
        result = _read(path)
        if result is not None:
            yield result


def _read(path: Path) -> RunResult | None:
    try:
        with path.open("rb") as file:
            result = pickle.load(file)
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
        return None
    return result if isinstance(result, RunResult) else None


def _source_digest() -> str:
    """Of all code that decides the result of a run: commands do not."""
    root = Path(cosched.__path__[0])
    digest = hashlib.sha256()
    for package in (root, Path(cosched_patches.__path__[0]), Path(cosched_traces.__path__[0])):
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package).as_posix()
            is_command = package == root and path.parent in (root, root / "lab")
            is_irrelevant = package == root and name.startswith(_IRRELEVANT)
            if name in ("config.py", "policies.py") or not (is_command or is_irrelevant):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest_of_file(path: str | None) -> str | None:
    """Of a policy outside cosched."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
