"""What the commands share: options that are checked before anything runs, and how they end.

A command ends with one JSON object as its last line, or with one sentence and an exit code. An
output that cannot be written is found before the run; one that fails after it costs no result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from inspect import Parameter, getdoc, signature
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cosched.errors import CoschedError
from cosched.files import write_whole
from cosched.versions import version_line, versions

T = TypeVar("T")

_ENTRY = "cosched "
"""How ``sys.argv[0]`` begins where `cosched.__main__` runs a command."""


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` with ``--version``, whose errors are one sentence."""

    def __init__(self, *, prog: str, **options: Any) -> None:
        """prog  how the module is run; the name under ``cosched`` stands where that was used"""
        if sys.argv[0].startswith(_ENTRY) and prog.startswith("python -m cosched."):
            prog = sys.argv[0]
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(prog=prog, **options)
        if self.add_help:
            self.add_argument(
                "--version",
                action=_Version,
                nargs=0,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help="show what is installed, and exit",
            )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cosched: {message} ({self.prog} --help lists the options)\n")


class _Version(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(version_line())
        parser.exit()


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of an option: what `read` makes of the text. Its CoschedError is the option's."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except CoschedError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _limits(
    above: float | None, at_least: float | None, at_most: float | None, below: float | None
) -> str:
    named = (("above", above), ("of at least", at_least), ("of at most", at_most), ("below", below))
    said = [f"{word} {limit:g}" for word, limit in named if limit is not None]
    return "".join(f" {text}" if i == 0 else f" and {text}" for i, text in enumerate(said))


def number(
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Callable[[str], float]:
    """A type of an option: a finite number within limits."""
    wanted = "a number" + _limits(above, at_least, at_most, below)

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_good = (
            math.isfinite(value)
            and (above is None or value > above)
            and (at_least is None or value >= at_least)
            and (at_most is None or value <= at_most)
            and (below is None or value < below)
        )
        if not is_good:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def whole(*, at_least: int | None = None, at_most: int | None = None) -> Callable[[str], int]:
    """A type of an option: an integer within limits, both included."""
    wanted = "a whole number" + _limits(None, at_least, at_most, None)

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if (
            value is None
            or (at_least is not None and value < at_least)
            or (at_most is not None and value > at_most)
        ):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


PORT = whole(at_least=1, at_most=65535)


def field_texts(struct: type) -> Mapping[str, str]:
    """What the docstrings of a struct or data class and of those that it extends say of its fields:
    their lines ``name   what it is``, with those that follow and are indented."""
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


class Kind:
    """What the annotation of a field (``Annotated[type, Kind(...)]``) says of its option."""

    def __init__(
        self,
        read: Callable[[str], Any] | None = None,
        metavar: str | None = None,
        *flags: str,
        **more: Any,
    ) -> None:
        """
        read     what makes its value of the text; None: as goes with the type of the field
        metavar  what stands for the value in the help
        flags    its names; without any that of the field
        more     options of `add_argument`
        """
        self.flags = flags
        self.more = more
        if read is not None:
            more["type"] = read
        if metavar is not None:
            more["metavar"] = metavar


def add_options(parser: argparse._ActionsContainer, struct: type) -> None:
    """An option for each field of a struct: what it does is in the docstrings (`field_texts`),
    what it takes in its type, which may have a `Kind`. A field without a default must be given."""
    for name in signature(struct).parameters:
        add_field_option(parser, struct, name)


def introduction(struct: type) -> str:
    """What the docstring of a struct says before it comes to fields."""
    paragraphs = (getdoc(struct) or "").split("\n\n")
    return "\n\n".join(one for one in paragraphs if not re.match(r"\w+  ", one))


def add_command(
    commands: Any,
    options: type,
    execute: Callable[[argparse.Namespace], Mapping[str, Any]],
    *,
    description: str | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """The subcommand that is called as the struct of its options, in small letters. The first line
    of the struct's docstring is its help, what follows its description unless there is another."""
    summary, _, rest = introduction(options).partition("\n\n")
    parser: argparse.ArgumentParser = commands.add_parser(
        options.__name__.lower(),
        help=summary.removesuffix(".").replace("%", "%%"),
        description=description or rest or None,
        epilog=epilog,
    )
    add_options(parser, options)
    parser.set_defaults(execute=execute)
    return parser


def add_field_option(
    group: argparse._ActionsContainer, struct: type, name: str, *flags: str, **options: Any
) -> None:
    """An option for the field `name` of a struct or data class.

    flags    its names; without any that of the field. The value gets the name of the field
    options  of `add_argument`, where they are not what follows from the field: its default; a type
             or action that goes with its type, numbers above 0; and as help its text
    """
    default = signature(struct).parameters[name].default
    kind = get_type_hints(struct, include_extras=True)[name]
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    kind, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    for note in reversed(notes):
        flags, options = flags or note.flags, {**note.more, **options}
    text = field_texts(struct).get(name, "").replace("``", "`").replace("%", "%%")
    if default is Parameter.empty:
        default = None
        options.setdefault("required", "default" not in options)
    if kind is bool and default is False:
        options.setdefault("action", "store_true")
    elif kind is bool:
        options.setdefault("action", argparse.BooleanOptionalAction)
        text += " (default: on)" if default else ""
    else:
        options.setdefault("type", {int: whole(at_least=1), float: number(above=0)}.get(kind))
        if isinstance(default, int | float | str | Path) and not re.search(
            "(default|absent): ", text
        ):
            shown = f"default: {default:g}" if kind is float else f"default: {default}"
            text = f"{text} ({shown})" if text else shown
    given = {"dest": name, "default": default, "help": text, **options}
    group.add_argument(*flags or [f"--{name.replace('_', '-')}"], **given)


def fields_given(struct: Callable[..., T], arguments: argparse.Namespace) -> T:
    """A struct or data class with the fields that have options (`add_field_option`)."""
    names = signature(struct).parameters
    return struct(**{name: vars(arguments)[name] for name in names if name in arguments})


def existing_file(text: str) -> Path:
    """A type of an option: a file that can be read."""
    path = Path(text)
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}: {error.strerror}") from None


def output_file(text: str) -> Path:
    """A type of an option: a file that can be written. Nothing is left behind by the check."""
    path = Path(text)
    try:
        if path.exists():
            with path.open("ab"):
                return path
        _check_folder(path.absolute().parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    return path


def output_folder(text: str) -> Path:
    """A type of an option: a folder that is there, or can be made, and can be written to."""
    path = folder = Path(text).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        _check_folder(folder)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write to a folder {text!r}: {error.strerror}"
        ) from None
    return path


def _check_folder(folder: Path) -> None:
    # Permissions say too little: nobody can make a file in /proc, and root may write anywhere else.
    with tempfile.TemporaryFile(dir=folder):
        pass


Share = Annotated[float, Kind(number(above=0, at_most=1), "SHARE")]
Part = Annotated[float, Kind(number(above=0, below=1), "SHARE")]
Count = Annotated[int, Kind(None, "N")]
Seconds = Annotated[float, Kind(None, "S")]
OldFile = Annotated[Path, Kind(existing_file, "FILE")]
NewFile = Annotated[Path, Kind(output_file, "FILE")]
NewFolder = Annotated[Path, Kind(output_folder, "DIR")]


class JsonOption(msgspec.Struct):
    """Of every command that ends with a line of JSON.

    json  write there what the last line of the output is
    """

    json: NewFile | None = None


def add_json_option(parser: argparse._ActionsContainer) -> None:
    add_options(parser, JsonOption)


def save_output(
    arguments: argparse.Namespace, path: Path | None, write: Callable[[Path], object]
) -> None:
    """Write one output after the run, where it was asked for. What fails is told, and the command
    goes on: its result is still printed, and it ends with 1."""
    if path is None:
        return
    try:
        write(path)
    except (OSError, CoschedError) as error:
        arguments.has_lost_output = True
        _say(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}")


def run_command(
    arguments: argparse.Namespace, *, packages: Sequence[str] = (), with_config: bool = False
) -> None:
    """Call ``arguments.execute`` and print what it returns, with the versions, those of `packages`
    too, and `with_config` the arguments.

    Exits with one sentence: with 2 when the arguments are wrong, with 1 when a server failed or an
    output could not be written, with 130 when interrupted.
    """
    execute: Callable[[argparse.Namespace], Mapping[str, Any]] = arguments.execute
    try:
        result = execute(arguments)
    except CoschedError as error:
        _say(str(error))
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        if error.filename is None:
            raise
        _say(f"{os.fspath(error.filename)}: {error.strerror}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        _say("interrupted")
        raise SystemExit(130) from None
    told: dict[str, Any] = {"versions": versions(*packages)}
    if with_config:
        told["config"] = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("execute", "has_lost_output")
        }
    line = json.dumps({**told, **result}, sort_keys=True, allow_nan=False)
    save_output(
        arguments, getattr(arguments, "json", None), lambda path: write_whole(path, line + "\n")
    )
    print(line, flush=True)
    if getattr(arguments, "has_lost_output", False):
        raise SystemExit(1)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that SIGTERM too ends in order, as KeyboardInterrupt: what `work` has started
    is stopped."""

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


def virtual_time_bar(*, is_quiet: bool) -> Progress:
    """A progress bar of seconds of virtual time; none where nobody looks."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} s of virtual time"),
        TimeRemainingColumn(),
        disable=is_quiet or not sys.stderr.isatty(),
    )


def _say(text: str) -> None:
    print(f"cosched: {text}", file=sys.stderr, flush=True)
