"""Results of runs kept on disk: a long comparison that was interrupted goes on where it was, and a
new policy is compared without running everything else again."""

from __future__ import annotations

import hashlib
import os
import pickle
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import cosched_patches
import cosched_traces
from cosched.lab.simulation.run import RunResult, RunSpec
from cosched.policies import policy_entry

_FORMAT = 7

_DECIDES_NOTHING = ("batch/", "engine/decision_log/", "lab/benchmark/", "lab/profiling/")
"""Folders of cosched whose code has no part in the result of a run."""

_DECIDE = ("config.py", "policies.py")
"""Files beside the commands that have."""


class ResultStore:
    """One file per run in a folder of the user's own (the files are pickles: nobody else's).

    A result counts for its exact specification, the versions of cosched and SGLang, and the source
    code that made it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = _source_digest()
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, spec: RunSpec) -> RunResult | None:
        """The result of an equal run, or None. A file that cannot be read counts as none. A run
        that went to its end is the result of those, too, that may give up."""
        for path in (self._path(replace(spec, most_misses=None)), self._path(spec)):
            try:
                with path.open("rb") as file:
                    result = pickle.load(file)
            except (OSError, EOFError, pickle.UnpicklingError):
                continue
            except (AttributeError, ImportError, TypeError):  # of a version that is too different
                continue
            if isinstance(result, RunResult):
                return replace(result, spec=spec)
        return None

    def put(self, result: RunResult) -> None:
        spec = result.spec if result.gave_up else replace(result.spec, most_misses=None)
        path = self._path(spec)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as file:
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
        partial.replace(path)

    def _path(self, spec: RunSpec) -> Path:
        policy = policy_entry(spec.setting.policy)
        is_stock = policy.make is None
        said = _said(
            replace(
                spec,
                setting=replace(spec.setting, summary=""),
                config=() if is_stock else spec.config,
            )
        )
        versions = [metadata.version("cosched"), metadata.version("sglang")]
        key = [_FORMAT, *versions, said, self._source, _digest_of_file(policy.source_file)]
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        return self._folder / f"{spec.setting.name.replace('/', '-')}-{digest}.pickle"


def _source_digest() -> str:
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in (root, Path(cosched_patches.__path__[0]), Path(cosched_traces.__path__[0])):
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package).as_posix()
            is_command = package == root and "/" not in name and name not in _DECIDE
            if not is_command and not name.startswith(_DECIDES_NOTHING):
                digest.update(path.read_bytes())
    return digest.hexdigest()


class _Pickler(pickle.Pickler):
    """Keeps data classes by the names of their fields: those with slots are pickled by position,
    and a field that a later version adds would move all behind it."""

    def reducer_override(self, value: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type):
            return NotImplemented
        named = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return _made_of, (type(value), named)


def _made_of(kind: Any, named: dict[str, Any]) -> Any:
    """What this version has no field for is dropped. TypeError where it needs one more."""
    known = {entry.name for entry in fields(kind)}
    return kind(**{name: value for name, value in named.items() if name in known})


def _digest_of_file(path: str | None) -> str | None:
    """Of a policy from outside of cosched."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _said(value: Any) -> Any:
    """A specification without what it leaves at its default: an option that a later version adds
    does not make earlier results worthless."""
    if not is_dataclass(value):
        return value
    said = {}
    for entry in fields(value):
        part = getattr(value, entry.name)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if default is MISSING or part != default:
            said[entry.name] = _said(part)
    return said
