"""Any command line: bad values are one sentence before anything runs, and no result is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from cyclopts import CycloptsError

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import cli
from cosched.batch.jsonl.config import JobConfig
from cosched.cli import COMMANDS, JsonOption, main
from cosched.errors import ConfigError

BAD_NUMBERS = ("nan", "inf", "-inf", "1e999", "x", "", "0x10", "-2")
BAD_PATHS = ("/proc/cosched", "/dev/null/file")
CHECKED_LATER = ("serve", "batch", "demo-model")
"""Their numbers are checked by the structs that they become."""


def apps(app):
    """An application and its commands, by their words."""
    yield app.name[0], app
    for name in app:
        if not name.startswith("-"):
            yield f"{app.name[0]} {name}", app[name]


OPTIONS = {
    f"{argument.name} {argument.hint}": pytest.param(app, argument, id=f"{words} {argument.name}")
    for module, _ in COMMANDS.values()
    for words, app in apps(import_module(module).app)
    if app.default_command is not None
    for argument in app.assemble_argument_collection()
    if argument.hint is not bool and argument.parse and words.split()[0] not in CHECKED_LATER
}


def refusal(capsys, *words):
    """The one sentence with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("cosched: ") and shown.count("\n") == 1, shown
    return shown


def bad_values_of(argument):
    kinds = {argument.hint, *getattr(argument.hint, "__args__", ())}
    if kinds & {int, float}:
        return BAD_NUMBERS
    if argument.parameter.metavar in ("FILE", "DIR") and argument.name != "--data-dir":
        return BAD_PATHS
    return ("x",) if argument.parameter.choices else ()


@pytest.mark.parametrize(("app", "argument"), OPTIONS.values())
def test_a_bad_value_is_refused_by_the_name_of_its_option(app, argument):
    required = [
        f"{one.name}={__file__}"
        for one in app.assemble_argument_collection()
        if one.required and one.parse and one.name != argument.name
    ]
    for value in bad_values_of(argument):
        words = [*required, f"{argument.name}={value}"]
        with pytest.raises(CycloptsError) as error:
            app.parse_args(words, exit_on_error=False, print_error=False)
        error.value.verbose = False
        assert argument.name in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["bench", "run", "--seeds", "0"],
            '"0" for --seeds. Must be >= 1 (cosched bench run --help',
        ),
        (["bench", "run", "--settings", " , "], "--settings: ' , ' names nothing"),
        (["bench", "run", "--seeds", "1.5"], "--seeds: '1.5' is not a whole number"),
        (
            ["bench", "run", "--gpu", "H10"],
            'Choose from: "A100-40", "A100-80", "H100", "H200". Did',
        ),
        (["bench", "rnu"], '"rnu". Did you mean "run"? Available commands: suite'),
        (["estimate", "x"], "cannot read"),
        (["simulate", "--polcy", "x"], "--polcy. Did you mean --policy?"),
        (["simulate", "--seed"], "--seed needs a value"),
        (["simulate", "x"], "unexpected argument 'x'"),
        (["simulate", "--chunked-prefill-size", "0"], "is not a whole number of at least 1, or -1"),
        (["estimate", "absent", "--trace", "x"], "cannot read 'absent': No such file"),
        (["simulat"], "no command 'simulat'; choose from batch, bench"),
        (["simulat"], "did you mean 'simulate'? (cosched --help"),
    ],
)
def test_wrong_usage_is_one_sentence(words, said, capsys):
    assert said in refusal(capsys, *words)


def test_words_from_elsewhere_are_read_as_options_and_refused_as_wrong_configuration():
    assert cli.parse(JsonOption, ["--json", "x"]).json == Path("x")
    with pytest.raises(ConfigError, match="--jsno"):
        cli.parse(JsonOption, ["--jsno", "x"])


def test_checking_a_path_leaves_nothing_behind(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("old")
    assert cli.output_file(str(tmp_path / "new")) == tmp_path / "new"
    assert cli.output_file(str(kept)) == kept
    assert cli.output_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "old"
    for check, bad in (
        (cli.output_file, tmp_path),
        (cli.output_file, kept / "below"),
        (cli.output_folder, kept),
    ):
        with pytest.raises(ValueError, match="cannot write"):
            check(str(bad))


def test_the_last_line_is_also_written_to_a_file(tmp_path, capsys):
    assert main(["config", "{}", "--json", str(tmp_path / "x.json")]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "x.json").read_text() == line + "\n"
    assert json.loads(line)["program"] == "config"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("no")])
def test_an_output_that_fails_after_the_run_costs_no_result(error, tmp_path, capsys):
    def write(path):
        raise error

    options = JsonOption()
    options.save(tmp_path / "picture", write)
    assert options.finish({"answer": 42}) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["answer"] == 42
    assert shown.err.startswith("cosched: cannot write ") and shown.err.count("\n") == 1


def test_help_explains_every_command_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["--help"]) == 0 and main([]) == 2
    shown = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert any(name in line and summary in line for line in shown.splitlines())


@pytest.mark.parametrize("words", [["explain"], ["bench", "run"], ["bench"], ["batch", "fetch"]])
def test_each_command_has_help_of_its_own(words, capsys):
    assert main([*words, "--help"]) == 0
    assert f"Usage: cosched {' '.join(words)} " in capsys.readouterr().out


def test_an_option_has_the_text_of_the_field_that_it_sets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["batch", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    [text] = re.findall(r"^ *concurrency +(.*)$", JobConfig.__doc__, flags=re.M)
    assert f"--concurrency INT {text}" in shown


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_only_what_is_needed_is_imported():
    done = run_python(
        "import sys; from cosched.cli import main; main(['--version']); main(['--help']);"
        "print(sorted({'sglang', 'torch', 'numpy'} & set(sys.modules)))"
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]", done.stderr
    assert lines[0].startswith("cosched ")
    assert f"sglang {metadata.version('sglang')}" in lines
    assert any(line.startswith("torch 2") for line in lines)


def test_a_command_that_lacks_its_engine_says_so():
    done = run_python(
        "import sys; sys.modules['torch'] = None; from cosched.cli import main;"
        "sys.exit(main(['simulate', '--online', 'azure-like', '--duration', '1']))"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("cosched: simulate needs torch"), done.stderr


@pytest.mark.parametrize(
    "command", [["config", "{}"], ["bench", "suite", "--list"], ["batch", "-i", "/no", "-o", "/no"]]
)
def test_the_last_line_is_json_for_programs_and_left_out_on_a_terminal(
    command, capsys, monkeypatch
):
    def shown():
        main(command)
        return capsys.readouterr().out

    piped = shown()
    assert json.loads(piped.splitlines()[-1])["versions"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown() == "".join(piped.splitlines(keepends=True)[:-1])
