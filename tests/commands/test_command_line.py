"""Bad values on any command line: one sentence, before anything runs, and nothing is lost."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import bench, demo, explain, profile, simulate, tune
from cosched.__main__ import COMMANDS, main
from cosched.command_line import (
    JsonOption,
    Kind,
    Parser,
    Share,
    add_command,
    add_field_option,
    add_json_option,
    fields_given,
    number,
    output_file,
    output_folder,
    run_command,
    save_output,
    whole,
)
from cosched.errors import ConfigError

PARSERS = {
    "demo": demo.build_parser(),
    "simulate": simulate.build_parser(),
    "explain": explain.build_parser(),
    "tune": tune.build_parser(),
    **{
        f"{module.__name__.rpartition('.')[2]} {name}": parser
        for module in (bench, profile)
        for action in module.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, parser in action.choices.items()
    },
}
OPTIONS = [
    pytest.param(parser, action, id=f"{name} {action.option_strings[0]}")
    for name, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings and action.nargs != 0 and action.type is not None
]
BAD_NUMBERS = ("-1", "nan", "inf", "-inf", "1e999", "x", "", "0x10")
BAD_PATHS = ("/proc/cosched", "/no/such/folder/file", "/dev/null/file")


def refusal(capsys, parse, *arguments):
    """The one sentence with which it ends."""
    with pytest.raises(SystemExit) as ended:
        parse(list(arguments))
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("cosched: ") and shown.count("\n") == 1, shown
    return shown


def is_of(action, factory):
    return getattr(action.type, "__qualname__", "").startswith(f"{factory.__name__}.")


@pytest.mark.parametrize(("parser", "action"), OPTIONS)
def test_a_bad_value_is_one_sentence_that_names_option_and_value(parser, action, capsys):
    option = action.option_strings[0]
    numeric = is_of(action, number) or is_of(action, whole)
    writes = action.type in (output_file, output_folder)
    values = BAD_NUMBERS if numeric else BAD_PATHS if writes else ()
    if action.type is output_folder:
        values = ("/proc/cosched", "/dev/null/folder")
    for value in values:
        shown = refusal(capsys, parser.parse_args, f"{option}={value}")
        assert "/".join(action.option_strings) in shown and repr(value) in shown


def test_no_number_and_no_path_is_read_unchecked():
    """So that an option that is added later is checked too."""
    unchecked = [
        f"{parser.prog} {action.option_strings or action.dest}"
        for parser in PARSERS.values()
        for action in parser._actions
        if action.type in (int, float)
    ]
    assert not unchecked


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (number(above=0), ["1e-9", "3"], ["0", "-1"]),
        (number(at_least=0, at_most=1), ["0", "1"], ["-0.1", "1.1"]),
        (number(above=0, below=1), ["0.5"], ["0", "1"]),
        (whole(at_least=1), ["1", "12"], ["0", "1.5", "-3"]),
        (whole(at_least=1, at_most=65535), ["65535"], ["65536"]),
    ],
)
def test_limits_are_those_that_are_said(make, good, bad):
    for text in good:
        assert make(text) == float(text)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
            make(text)


def test_checking_a_path_leaves_nothing_behind(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("old")
    assert output_file(str(tmp_path / "new")) == tmp_path / "new"
    assert output_file(str(kept)) == kept
    assert output_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "old"
    for bad in (tmp_path, kept / "below"):
        with pytest.raises(argparse.ArgumentTypeError):
            output_file(str(bad))
    with pytest.raises(argparse.ArgumentTypeError):
        output_folder(str(kept))


class TestEnding:
    def run(self, execute, *argv):
        parser = Parser(prog="test")
        add_json_option(parser)
        parser.set_defaults(execute=execute)
        run_command(parser.parse_args(argv))

    def test_the_last_line_is_written_where_it_was_asked_for(self, tmp_path, capsys):
        self.run(lambda arguments: {"answer": 42}, "--json", str(tmp_path / "x.json"))
        line = capsys.readouterr().out.splitlines()[-1]
        assert (tmp_path / "x.json").read_text() == line + "\n"
        assert json.loads(line)["answer"] == 42

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("no")])
    def test_an_output_that_fails_after_the_run_costs_no_result(self, error, tmp_path, capsys):
        def execute(arguments):
            def write(path):
                raise error

            save_output(arguments, tmp_path / "picture", write)
            return {"answer": 42}

        with pytest.raises(SystemExit) as ended:
            self.run(execute)
        shown = capsys.readouterr()
        assert ended.value.code == 1
        assert json.loads(shown.out.splitlines()[-1])["answer"] == 42
        assert shown.err.startswith("cosched: cannot write ") and shown.err.count("\n") == 1


class TestOneCommand:
    def test_help_explains_every_command_in_a_line(self, capsys):
        assert main(["--help"]) == 0
        shown = capsys.readouterr().out
        for name, command in COMMANDS.items():
            [line] = [x for x in shown.splitlines() if x.split()[:1] == [name]]
            assert line.endswith(command.summary)

    def test_an_unknown_one_names_the_others(self, capsys):
        assert main(["simulat"]) == 2
        assert "no command 'simulat'; choose from batch, bench" in capsys.readouterr().err

    def test_it_imports_only_what_it_needs(self):
        code = (
            "import sys; from cosched.__main__ import main; main(['--version']); main(['--help']);"
            "print(sorted({'sglang', 'torch', 'numpy', 'rich'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        lines = done.stdout.splitlines()
        assert lines[-1] == "[]", done.stderr
        assert lines[0].startswith("cosched ")
        assert f"sglang {metadata.version('sglang')}" in lines[0]
        assert "torch 2" in lines[0] and "python 3" in lines[0]

    def test_one_that_lacks_its_engine_says_so(self):
        code = (
            "import sys; sys.modules['torch'] = None; from cosched.__main__ import main;"
            "sys.exit(main(['simulate', '--help']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("cosched: simulate needs torch"), done.stderr

    def test_a_command_is_run_with_its_arguments_under_its_name(self, tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "cosched", "explain", "--iteration", "-1", "x"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert "argument --iteration" in done.stderr and "(cosched explain --help" in done.stderr


@dataclass(frozen=True, kw_only=True)
class Oven:
    """Fields, and what the docstring says of them.

    heat_c  degrees [C]; default: as the recipe says
    trays   at most so many
            at a time
    fan     it runs
    """

    heat_c: float | None = None
    trays: int = 2
    fan: bool = True
    shelves: int = 3


class Bake(JsonOption, kw_only=True):
    """Bake 100 % of it.

    It takes a while.

    recipe  what is baked
    """

    recipe: Annotated[str, Kind(None, "NAME", "-r", "--recipe")]
    share: Share = 0.5
    doors: Annotated[int, Kind(choices=[1, 2])] | None = None
    quiet: bool = False


def test_a_subcommand_is_made_of_a_struct_with_the_fields_of_those_before_it(capsys):
    parser = Parser(prog="test")
    add_command(parser.add_subparsers(), Bake, lambda arguments: {})
    assert "Bake 100 % of it\n" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["bake", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "It takes a while." in shown and "-r NAME, --recipe NAME what is baked" in shown
    assert "--share SHARE default: 0.5" in shown and "--doors {1,2}" in shown
    assert "--json FILE write there what" in shown
    given = parser.parse_args(["bake", "-r", "bread", "--doors", "2", "--quiet"])
    assert (given.recipe, given.share, given.doors, given.quiet) == ("bread", 0.5, 2, True)
    assert "required: -r/--recipe" in refusal(capsys, parser.parse_args, "bake")
    assert "above 0" in refusal(capsys, parser.parse_args, "bake", "-r", "x", "--share", "0")


def test_an_option_of_a_field_has_its_name_type_default_and_text():
    parser = argparse.ArgumentParser()
    add_field_option(parser, Oven, "heat_c", "--heat", metavar="C")
    for field in ("trays", "fan"):
        add_field_option(parser, Oven, field)
    shown = " ".join(parser.format_help().split())
    assert "--heat C degrees [C]; default: as the recipe says --trays" in shown
    assert "at most so many at a time (default: 2)" in shown
    assert fields_given(Oven, parser.parse_args([])) == Oven()
    given = parser.parse_args(["--heat", "180.5", "--trays", "1", "--no-fan"])
    assert fields_given(Oven, given) == Oven(heat_c=180.5, trays=1, fan=False)
    for bad in (["--heat", "0"], ["--trays", "0"], ["--trays", "1.5"]):
        with pytest.raises(SystemExit):
            parser.parse_args(bad)
