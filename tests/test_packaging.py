"""What holds the source tree together: layers, source roots, pins, the plugin's entry point."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("kernels", "patches", "traces")

# A unit may import from itself and from units in lower rows, never sideways or up. What stands in
# no row is a command: a module of the cosched package, above the packages that only commands use.
LAYERS = (
    ("cosched", "errors", "files", "bootstrap", "versions", "cosched_kernels"),
    ("core",),
    ("pool", "predict", "limits", "cli", "cosched_traces"),
    ("memory", "schedule"),
    ("papers",),
    ("policies", "batch"),
    ("config",),
    ("engine",),
    ("cosched_patches",),
    ("lab",),
)
RANKS = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}
COMMAND_PACKAGE, COMMAND = len(LAYERS), len(LAYERS) + 1

PURE = ("core", "limits", "memory", "papers", "policies", "pool", "predict", "schedule")


def source_files() -> list[Path]:
    folders = [ROOT / "cosched", *(ROOT / name / f"cosched_{name}" for name in SOURCE_ROOTS)]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in SOURCE_ROOTS:
        parts = parts[1:]
    return ".".join(parts).removesuffix(".__init__")


def unit_of(module: str) -> str:
    """The row entry a module belongs to: its package below ``cosched``, or its own package."""
    parts = module.split(".")
    return parts[1] if parts[0] == "cosched" and len(parts) > 1 else parts[0]


def is_module(package: str, alias: ast.alias) -> bool:
    below = ROOT / "cosched" / alias.name
    return package == "cosched" and (below.is_dir() or below.with_suffix(".py").exists())


def rank_of(unit: str) -> int:
    is_package = (ROOT / "cosched" / unit).is_dir()
    return RANKS.get(unit, COMMAND_PACKAGE if is_package else COMMAND)


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import in a file, those inside functions included."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from cosched import core` imports cosched.core, `... import __version__` does not.
            below = [f"{base}.{alias.name}" for alias in node.names if is_module(base, alias)]
            yield from ((module, node.lineno) for module in below or [base])


def pins(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", SOURCE_ROOTS)
def test_source_roots_are_no_packages(name):
    # A top-level package `kernels` would shadow the one that SGLang imports from Hugging Face.
    assert not (ROOT / name / "__init__.py").exists()


def wrong_imports(is_wrong) -> list[str]:
    """Imports of which `is_wrong(importing module, imported module)`."""
    return [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in source_files()
        for module, line in imported_modules(path)
        if is_wrong(module_name(path), module)
    ]


OWN = {"cosched", *(f"cosched_{name}" for name in SOURCE_ROOTS)}


def top_of(module: str) -> str:
    return module.split(".")[0]


def goes_up(importer: str, module: str) -> bool:
    unit, imported = unit_of(importer), unit_of(module)
    return top_of(module) in OWN and unit != imported and rank_of(imported) >= rank_of(unit)


def may_import_sglang(importer: str) -> bool:
    unit = unit_of(importer)
    is_allowed = unit in ("engine", "cosched_patches") or importer == "cosched.lab.local_engine"
    return is_allowed or rank_of(unit) >= COMMAND_PACKAGE


UNDECIDED = ("time", "random", "secrets", "torch", "sglang")
RULES = {
    "imports go down only": goes_up,
    "only the engine, its patches and the commands import SGLang": lambda importer, module: (
        top_of(module) == "sglang" and not may_import_sglang(importer)
    ),
    "only the kernels import Triton": lambda importer, module: (
        top_of(module) == "triton" and unit_of(importer) != "cosched_kernels"
    ),
    "decisions depend on no clock, no chance and no engine": lambda importer, module: (
        unit_of(importer) in PURE and top_of(module) in UNDECIDED
    ),
    "core imports the standard library and numpy only": lambda importer, module: (
        unit_of(importer) == "core"
        and top_of(module) not in {"cosched", "numpy", *sys.stdlib_module_names}
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_keep_the_rule(rule):
    wrong = wrong_imports(RULES[rule])
    assert not wrong, "\n".join(wrong)


def test_the_cpu_list_is_pinned_sorted_and_without_repeats():
    lines = pins((ROOT / "requirements" / "cpu.txt").read_text())
    unpinned = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.!+]+", line)]
    assert not unpinned
    assert lines == sorted(lines)
    names = [canonical(line.split("==")[0]) for line in lines]
    assert len(names) == len(set(names))


def test_the_cpu_list_covers_what_is_asked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = (ROOT / "requirements" / "cpu.in").read_text()
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"], *pins(source)]
    asked += re.findall(r"^#: no-deps (\S+)$", source, flags=re.MULTILINE)
    names = {canonical(re.split(r"[<>=!~\[; ]", line)[0]) for line in asked}
    listed = {
        canonical(line.split("==")[0])
        for line in pins((ROOT / "requirements" / "cpu.txt").read_text())
    }
    assert names - listed == {"torch"}, "run scripts/lock"


def test_the_installed_sglang_is_the_supported_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = project["optional-dependencies"]["gpu"][0]
    assert supported == f"sglang=={importlib.metadata.version('sglang')}"


def test_the_plugin_entry_point_is_installed():
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="cosched")
    assert [entry.value for entry in found] == ["cosched_patches.plugin:register"]
    assert callable(next(iter(found)).load())
