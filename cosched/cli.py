"""The command line: ``cosched COMMAND ...``, and what its commands share.

cyclopts parses and explains: an option is a field of a data class, and the string below it is the
help. This module adds what cyclopts does not have: option types that check a file before the run,
help texts from the docstring of a configuration struct, and the end of a command: one line of JSON,
or one sentence and an exit code. An output that cannot be written is found before the run; one that
fails after it does not cost the result.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc, signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, TypeVar

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownCommandError,
    UnusedCliTokensError,
)
from cyclopts.validators import Number

from cosched.errors import ConfigError, CoschedError, choices
from cosched.files import write_whole
from cosched.versions import version_text, versions

T = TypeVar("T")

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": (
        "cosched.serve",
        "Start a server for online and offline requests. Takes every SGLang flag.",
    ),
    "batch": ("cosched.batch.jsonl.command", "Run a file of requests as offline work."),
    "ray": ("cosched.ray_data", "Run a data set of requests on many replicas, with Ray Data."),
    "trial": (
        "cosched.lab.trial",
        "Try it on your machine and model, beside stock SGLang, in ten minutes.",
    ),
    "simulate": ("cosched.lab.simulate", "Run the scheduler on a simulated GPU."),
    "bench": ("cosched.lab.bench", "Compare policies and stock scheduling."),
    "tune": ("cosched.lab.tune", "Choose budgets and sizes for a workload, by simulation."),
    "estimate": (
        "cosched.lab.estimate",
        "Estimate when a file of requests would finish beside a day of chat.",
    ),
    "profile": (
        "cosched.lab.profile",
        "Measure iteration times; find the largest budget that meets targets.",
    ),
    "explain": ("cosched.explain", "Read a decision log: why did a request wait?"),
    "config": ("cosched.check_config", "Validate or print the configuration."),
    "demo-model": ("cosched.lab.demo_model", "Make a small model with random weights."),
}
"""The module and the summary of each command. Only the module of the chosen one is imported."""


def new_app(name: str, help: str | None = None, **options: Any) -> App:
    """The application of a command, or of all. A command is a data class: its fields are the
    options, its docstring the help, and the instance is called."""
    return App(
        name=name,
        help=help,
        help_format="markdown",
        version=version_text,
        version_format="plaintext",
        default_parameter=Parameter(
            negative_bool=(), negative_iterable=(), allow_repeating=True, show_default=_shown
        ),
        result_action=("call_if_callable", "return_value"),
        suppress_keyboard_interrupt=False,
        **{"help_epilogue": "", **options},
    )


def _shown(default: Any) -> str | None:
    """How the help shows a default."""
    if default is None or default is False or default == ():
        return None
    return f"{default:g}" if isinstance(default, float) else str(default)


def _root(*, chosen: str) -> App:
    root = new_app(
        "cosched",
        "Co-serving of online and offline LLM requests on one SGLang replica.",
        help_epilogue="cosched COMMAND --help explains one command.",
    )
    for name, (module, summary) in COMMANDS.items():
        # The chosen one has a help of its own, which the summary would replace.
        help = None if name == chosen else summary
        root.command(f"{module}:app", name=name, help=help)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Ends with one sentence and 2 if the arguments are
    wrong, 1 if a server failed or an output could not be written, 130 after an interrupt."""
    words = list(sys.argv[1:] if argv is None else argv)
    # As with `python -m`, a policy in the current folder can be imported. Last in the path, so that
    # no file there shadows an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        root = _root(chosen=words[0] if words else "")
        code = root(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CycloptsError as error:
        command = " ".join(["cosched", *_commands_of(error)])
        _end(2, f"{_sentence(error)} ({command} --help lists the options)")
    except CoschedError as error:
        _end(error.exit_code, str(error))
    except ImportError as error:
        # cyclopts has an error of its own where the import of a command fails.
        missing = getattr(error.__cause__ or error, "name", None)
        if missing not in ("torch", "sglang"):
            raise
        _end(
            2,
            f"{words[0]} needs {missing}, which is not installed: run scripts/setup, or install "
            "'cosched[gpu]'",
        )
    except OSError as error:
        if error.filename is None:
            raise
        _end(1, f"{os.fspath(error.filename)}: {error.strerror}")
    except KeyboardInterrupt:
        _end(130, "interrupted")
    return (code or 0) if words else 2


def run(command: str, argv: Sequence[str] | None = None) -> int:
    """`main` of one command, for the modules that can be run by themselves."""
    return main([command, *(sys.argv[1:] if argv is None else argv)])


def parse(options: type[T], words: Sequence[str]) -> T:
    """A data class of options from words that are not on the command line. ConfigError."""
    app = new_app("options")
    app.default(options)
    try:
        found: T = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ConfigError(_sentence(error)) from None
    return found


def _commands_of(error: CycloptsError) -> Sequence[str]:
    return [name for name in error.command_chain or () if not name.startswith("-")]


def _sentence(error: CycloptsError) -> str:
    error.verbose = False
    if isinstance(error, MissingArgumentError) and error.argument:
        if error.keyword:
            return f"{error.keyword} needs a value"
        name = error.argument.name
        if error.argument.field_info.is_positional:
            name = error.argument.parameter.metavar or name
        return f"{name} is missing"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"unexpected argument {error.unused_tokens[0]!r}"
    if isinstance(error, UnknownCommandError) and not _commands_of(error) and error.unused_tokens:
        # cyclopts would import every command for its own sentence.
        name = error.unused_tokens[0]
        close = "".join(
            f"; did you mean {x!r}?" for x in difflib.get_close_matches(name, COMMANDS, 1)
        )
        return f"no command {name!r}; choose from {choices(COMMANDS)}{close}"
    return " ".join(str(error).removesuffix(".").split())


def _end(code: int, text: str) -> NoReturn:
    _say(text)
    raise SystemExit(code)


def _say(text: str) -> None:
    print(f"cosched: {text}", file=sys.stderr, flush=True)


# Types of options.


def reader(read: Callable[[str], T]) -> Callable[[Any, Sequence[Token]], T]:
    """A converter of cyclopts: what `read` makes of the text."""
    return lambda _, tokens: _read(read, tokens[-1])


def _read(read: Callable[[str], T], token: Token) -> T:
    try:
        return read(token.value)
    except CoschedError as error:
        raise ValueError(str(error)) from None


def _whole(text: str) -> int:
    # cyclopts itself rounds 1.5.
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"{text!r} names nothing")
    return names


def existing_file(text: str) -> Path:
    """A file that can be read."""
    try:
        with Path(text).open("rb"):
            return Path(text)
    except OSError as error:
        raise ValueError(f"cannot read {text!r}: {error.strerror}") from None


def output_file(text: str) -> Path:
    """A file that can be written. The check leaves nothing behind."""
    path = Path(text)
    try:
        if path.exists():
            with path.open("ab"):
                return path
        _check_folder(path.absolute().parent)
    except OSError as error:
        raise ValueError(f"cannot write {text!r}: {error.strerror}") from None
    return path


def output_folder(text: str) -> Path:
    """A folder that exists, or can be made, and can be written to."""
    path = folder = Path(text).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        _check_folder(folder)
    except OSError as error:
        raise ValueError(f"cannot write to a folder {text!r}: {error.strerror}") from None
    return path


def _check_folder(folder: Path) -> None:
    # Permissions say too little: no file can be made in /proc, and root can write elsewhere.
    with tempfile.TemporaryFile(dir=folder):
        pass


def whole(least: int, most: int | None = None) -> Parameter:
    """A whole number within limits, both included."""
    return Parameter(converter=reader(_whole), validator=Number(gte=least, lte=most))


def number(**limits: float) -> Parameter:
    """A finite number within limits: gt, gte, lt, lte."""
    return Parameter(validator=Number(**{"lt": math.inf, **limits}))


Count = Annotated[int, whole(1)]
Words = Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, show=False)]
"""All that is no option of the command."""
Seed = Annotated[int, whole(0, 2**32 - 1)]
Positive = Annotated[float, number(gt=0)]
NotNegative = Annotated[float, number(gte=0)]
Share = Annotated[float, number(gt=0, lte=1)]
Part = Annotated[float, number(gt=0, lt=1)]
Names = Annotated[
    tuple[str, ...],
    Parameter(
        converter=reader(_names),
        metavar="A,B,…",
        show_default=lambda names: ", ".join(names) or "all",
    ),
]
OldFile = Annotated[Path, Parameter(converter=reader(existing_file), metavar="FILE")]
NewFile = Annotated[Path, Parameter(converter=reader(output_file), metavar="FILE")]
NewFolder = Annotated[Path, Parameter(converter=reader(output_folder), metavar="DIR")]
OnOff = Annotated[bool, Parameter(negative_bool="no-")]


def section(title: str) -> Parameter:
    """A field whose type is a data class: its fields are options, with a title of their own."""
    return Parameter(name="*", group=Group.create_ordered(title))


def field_texts(struct: type) -> Mapping[str, str]:
    """What the docstrings of a struct or data class and of its bases say of its fields: their lines
    ``name   what it is``, with the indented lines that follow."""
    names = signature(struct).parameters
    found: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        name = None
        for line in (getdoc(kind) or "").splitlines() if "__doc__" in vars(kind) else ():
            match = re.match(r"(\w+) +(\S.*)", line)
            if match and match[1] in names:
                name = match[1]
                found[name] = match[2]
            elif name and line.startswith("  "):
                found[name] += " " + line.strip()
            else:
                name = None
    return found


def explained_by(*structs: type) -> Callable[[type[T]], type[T]]:
    """Decorates a data class of options: fields with the names of fields of `structs` have their
    texts as help, and those that are None unless given name the number that then holds."""
    texts = {name: text for struct in structs for name, text in field_texts(struct).items()}
    numbers = {
        name: parameter.default
        for struct in structs
        for name, parameter in signature(struct).parameters.items()
        if type(parameter.default) in (int, float)
    }

    def decorate(options: type[T]) -> type[T]:
        for field in dataclasses.fields(options):  # type: ignore[arg-type]
            if field.name in texts:
                help = texts[field.name].replace("``", "`")
                if field.default is None and field.name in numbers:
                    help += f"; default: {numbers[field.name]:g}"
                field.metadata = MappingProxyType({"help": help})
        return options

    return decorate


# The end of a command.


def print_for_programs(line: str) -> None:
    """Print to a pipe or a file. A person at a terminal has the table above."""
    if not sys.stdout.isatty():
        print(line, flush=True)


@dataclass(kw_only=True)
class JsonOption:
    """Of every command that ends with a line of JSON."""

    json: NewFile | None = None
    """write all figures there, as one line of JSON; a pipe gets that line as the last one, and a
    terminal does not"""

    _has_lost_output = False

    def save(self, path: Path | None, write: Callable[[Path], object]) -> None:
        """Write one output after the run, if it was asked for. If that fails the command
        continues, prints its result, and ends with 1."""
        if path is None:
            return
        try:
            write(path)
        except (OSError, CoschedError) as error:
            self._has_lost_output = True
            _say(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}")

    def finish(self, result: Mapping[str, Any]) -> int:
        """Where a program reads the output, print the last line: the result, and the versions that
        made it. The exit code."""
        line = json.dumps({"versions": versions(), **result}, sort_keys=True, allow_nan=False)
        self.save(self.json, lambda path: write_whole(path, line + "\n"))
        print_for_programs(line)
        return int(self._has_lost_output)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in which SIGTERM, like SIGINT, ends the work in order, as KeyboardInterrupt."""

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
