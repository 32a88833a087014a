"""What holds the source tree together: layers, sizes, names, source roots, pins, the plugin."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
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
    ("wire",),
    ("pool", "predict", "limits", "cli", "cosched_traces"),
    ("memory",),
    ("schedule",),
    ("papers",),
    ("policies", "batch"),
    ("config",),
    ("engine",),
    ("cpu", "server"),
    ("cosched_patches",),
    ("lab",),
)
RANKS = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}
COMMAND_PACKAGE, COMMAND = len(LAYERS), len(LAYERS) + 1

PURE = ("core", "limits", "memory", "papers", "policies", "pool", "predict", "schedule")


def source_files() -> list[Path]:
    folders = [ROOT / "cosched", *(ROOT / name / f"cosched_{name}" for name in SOURCE_ROOTS)]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in SOURCE_ROOTS:
        parts = parts[1:]
    return ".".join(parts).removesuffix(".__init__")


def unit_of(module: str) -> str:
    """The row entry a module belongs to: its package below ``cosched``, or its own package."""
    parts = module.split(".")
    return parts[1] if parts[0] == "cosched" and len(parts) > 1 else parts[0]


@functools.cache
def own_modules() -> frozenset[str]:
    return frozenset(map(module_name, source_files()))


def rank_of(unit: str) -> int:
    is_package = (ROOT / "cosched" / unit).is_dir()
    return RANKS.get(unit, COMMAND_PACKAGE if is_package else COMMAND)


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import in a file, those inside functions included."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from cosched import core` imports cosched.core, `... import __version__` does not.
            for alias in node.names:
                below = f"{base}.{alias.name}"
                yield (below if below in own_modules() else base), node.lineno


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


def adapts_sglang(module: str) -> bool:
    """What a paper needs of the engine itself is a module of this name in the paper's folder."""
    return unit_of(module) == "papers" and module.rpartition(".")[2].startswith("sglang_")


def may_import_sglang(importer: str) -> bool:
    unit = unit_of(importer)
    is_below = unit in ("engine", "cpu", "server", "cosched_patches")
    is_allowed = is_below or importer == "cosched.lab.local_engine"
    return is_allowed or adapts_sglang(importer) or rank_of(unit) >= COMMAND_PACKAGE


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
        unit_of(importer) in PURE and top_of(module) in UNDECIDED and not adapts_sglang(importer)
    ),
    "core imports the standard library, numpy and msgspec only": lambda importer, module: (
        unit_of(importer) == "core"
        and top_of(module) not in {"cosched", "msgspec", "numpy", *sys.stdlib_module_names}
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_keep_the_rule(rule):
    wrong = wrong_imports(RULES[rule])
    assert not wrong, "\n".join(wrong)


def test_no_import_leads_back():
    """Imports inside functions and for types count too: a circle of files is one file to a
    reader."""
    graph = {
        module_name(path): {module for module, _ in imported_modules(path)} & own_modules()
        for path in source_files()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


PAPERS = re.compile(r"bros|eco_?serve|\becho|_echo|hygen", re.IGNORECASE)


def names_and_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, word) of all code. Docstrings may cite a paper, and comments."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield getattr(node, "lineno", 0), word


def test_the_papers_are_found_only_in_their_folder():
    """A policy or a kind of memory of a paper takes no line of the scheduler."""
    named = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in source_files()
        if unit_of(module_name(path)) in BOUNDED
        for line, word in names_and_texts(tree_of(path))
        if PAPERS.search(word)
    ]
    assert not named, "\n".join(named)


# What follows can only shrink: an exception that is no longer needed, or no longer as large, fails
# too.

MOST_LINES = 500
MOST_FIELDS = 15
MOST_PARAMETERS = 6
BOUNDED = ("core", "engine", "memory", "pool", "schedule")

LONG_FILES: dict[str, int] = {}

LARGE_CLASSES = {
    "a table, written out or sent as it is": {
        "cosched.engine.log.decisions.Decision": 19,
        "cosched.engine.state.ReplicaState": 48,
    },
    "each feature of the engine keeps what it knows here, not in a place of its own": {
        "cosched.engine.observe.IterationObserver": 18,
        "cosched.engine.tracked.TrackedRequest": 27,
        "cosched.engine.waiting.WaitingQueue": 16,
    },
    "each kind of memory is a case of its own here": {
        "cosched.engine.features.kv_manager.KvManager": 21,
    },
    "buffers that CUDA graphs have captured keep their addresses": {
        "cosched.engine.port.shared_prefix.SharedPrefixes": 18,
    },
}

LONG_SIGNATURES = {
    "what SGLang or PyTorch calls it with": {
        "cosched.engine.port.shared_prefix.SharedPrefixes.forward": 7,
    },
}

SAME_FILE_NAMES = {
    "a command, and the module that does its work": {"bench": 2, "profile": 2, "simulate": 2},
    "a part of cosched, and what adapts SGLang or a kernel to it": {
        "batch": 2,
        "decode_role": 2,
        "memory": 2,
        "plan": 2,
        "request": 2,
        "scheduler": 2,
        "shared_prefix": 2,
    },
    "each paper, or each package, has one": {
        "docs": 2,
        "errors": 4,
        "files": 3,
        "names": 4,
        "policy": 4,
        "predictor": 3,
    },
    "what the engine has, and what the simulator has in its place": {
        "clock": 2,
        "options": 2,
        "ranks": 2,
    },
    "says too little: to be renamed": {},
}

SAME_CLASS_NAMES = {
    "a part of cosched, and of the kernels, which import nothing of it": {
        "Groups": 2,
        "Plan": 2,
        "Shared": 3,
    },
    "what the engine has, and what the simulator has in its place": {"Ranks": 2},
    "a record of one command or one file format": {
        "Entry": 3,
        "Histogram": 2,
        "Job": 2,
        "Key": 2,
        "Measured": 3,
        "Page": 2,
        "Row": 2,
        "Run": 2,
        "Search": 2,
        "Snapshot": 2,
        "Source": 2,
        "Turn": 3,
        "Window": 4,
    },
    "says too little: to be renamed": {
        "Batch": 2,
        "Slo": 2,
        "Status": 2,
    },
}


def fields_of(definition: ast.ClassDef) -> set[str]:
    """Declared in the class, or assigned to ``self`` in its methods."""
    found = set()
    for node in definition.body:
        is_field = isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node)
        if is_field and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without ``self`` and ``cls``, and without ``*args`` and ``**kwargs``."""
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in names)


def definitions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """(dotted name, node) of each class and function of a file, nested ones included."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = f"{name}.{child.name}"
                yield inner, child
            yield from below(child, inner)

    yield from below(tree_of(path), module_name(path))


def bounded_definitions() -> list[tuple[str, ast.AST]]:
    files = [path for path in source_files() if unit_of(module_name(path)) in BOUNDED]
    return [found for path in files for found in definitions(path)]


def long_files() -> dict[str, int]:
    sizes = {module_name(path): path.read_text().count("\n") for path in source_files()}
    return {name: size for name, size in sizes.items() if size > MOST_LINES}


def large_classes() -> dict[str, int]:
    sizes = {
        name: len(fields_of(node))
        for name, node in bounded_definitions()
        if isinstance(node, ast.ClassDef)
    }
    return {name: size for name, size in sizes.items() if size > MOST_FIELDS}


def long_signatures() -> dict[str, int]:
    sizes = {
        name: num_parameters(node)
        for name, node in bounded_definitions()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    return {name: size for name, size in sizes.items() if size > MOST_PARAMETERS}


def same_file_names() -> dict[str, int]:
    files: defaultdict[str, int] = defaultdict(int)
    for path in source_files():
        files[path.stem] += path.stem not in ("__init__", "config")
    return {name: number for name, number in files.items() if number > 1}


def same_class_names() -> dict[str, int]:
    classes: defaultdict[str, int] = defaultdict(int)
    for path in source_files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name] += 1
    return {name: number for name, number in classes.items() if number > 1}


def one_table(exceptions: dict[str, dict[str, int]]) -> dict[str, int]:
    """Of exceptions by reason."""
    return {name: number for of_reason in exceptions.values() for name, number in of_reason.items()}


@pytest.mark.parametrize(
    ("found", "exceptions"),
    [
        pytest.param(long_files, LONG_FILES, id="lines"),
        pytest.param(large_classes, one_table(LARGE_CLASSES), id="fields"),
        pytest.param(long_signatures, one_table(LONG_SIGNATURES), id="parameters"),
        pytest.param(same_file_names, one_table(SAME_FILE_NAMES), id="file names"),
        pytest.param(same_class_names, one_table(SAME_CLASS_NAMES), id="class names"),
    ],
)
def test_no_more_exceptions_than_are_listed(found, exceptions):
    assert found() == exceptions


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


def programs() -> list[Path]:
    """In Python, beside the packages: type checks do not see all of them."""
    scripts = (path for path in (ROOT / "scripts").iterdir() if path.is_file())
    found = [*scripts, *(ROOT / "examples").glob("*.py")]
    return sorted(p for p in found if p.suffix == ".py" or "python" in _first_line(p))


def _first_line(path: Path) -> str:
    with path.open() as file:
        return file.readline()


@pytest.mark.parametrize("path", programs(), ids=lambda path: path.name)
def test_a_script_imports_what_there_is(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cosched":
            module = importlib.import_module(node.module)
            missing = [
                one.name
                for one in node.names
                if not hasattr(module, one.name)
                and not (Path(module.__file__).parent / f"{one.name}.py").exists()
            ]
            assert not missing, f"{node.module} has no {missing}"
