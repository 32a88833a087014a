"""``cosched config``: the keys, their page, and whether a configuration is right."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cosched.check_config import PAGE, groups, main, page
from cosched.config import ENV_VAR, Config
from cosched.memory.config import KvConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_config(monkeypatch):
    monkeypatch.delenv(ENV_VAR, raising=False)


def test_every_key_says_what_it_is_and_does():
    for path, keys in groups():
        for key in keys:
            assert key.text and key.kind, f"{path}.{key.name}"


def test_the_defaults_are_those_of_the_configuration():
    for path, keys in groups():
        place = json.loads(Config().to_json())
        for name in filter(None, path.split(".")):
            place = place.get(name) or {}
        for key in keys:
            if key.name in place and key.default:
                assert json.loads(key.default) == place[key.name], f"{path}.{key.name}"


def test_the_page_in_the_docs_is_up_to_date():
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page()


def test_passwords_of_databases_are_not_printed(capsys):
    for url, shown in (
        ("postgresql://me:sec%2Fret@db/b", "postgresql://me:***@db/b"),
        ("postgres://me@db/b?sslmode=require&password=secret", "password=hidden"),
        ("sqlite:////b.sqlite", "sqlite:////b.sqlite"),
    ):
        main([json.dumps({"batches": {"folder": "b", "url": url}})])
        printed = capsys.readouterr().out
        assert shown in printed and "sec" not in printed
    with pytest.raises(SystemExit):
        main([json.dumps({"batches": {"folder": "b", "url": "mysql://me:secret@db/b"}})])
    printed = "".join(capsys.readouterr())
    assert "batches.url must be postgresql://" in printed and "secret" not in printed


@pytest.mark.parametrize("is_file", [False, True])
def test_a_right_one_is_printed_with_all_defaults(is_file, capsys, tmp_path):
    text = '{"kv": {"eviction": "lru"}}'
    if is_file:
        (tmp_path / "my.json").write_text(text)
        text = str(tmp_path / "my.json")
    main([text])
    checked = json.loads(capsys.readouterr().out.splitlines()[-1])["config"]
    assert msgspec.convert(checked, Config) == Config(kv=KvConfig(eviction="lru"))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"kv": {"evicton": "lru"}}', ["evicton"]),
        ('{"kv": {"eviction": "random"}}', ["random", "lru"]),
        ('{"policy": "hygne"}', ["hygne", "hygen"]),
        ("/no/such/file.json", ["cosched: cannot read '/no/such/file.json': No such file"]),
        ('{"polcy": "x"}', ["cosched: the argument: Object contains unknown field `polcy`"]),
    ],
)
def test_a_wrong_one_ends_with_one_sentence(text, names, capsys):
    with pytest.raises(SystemExit) as ended:
        main([text])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    for name in names:
        assert name in shown


def test_without_an_argument_the_keys_are_printed_and_the_variable_is_checked(monkeypatch, capsys):
    main([])
    shown = capsys.readouterr().out
    assert "recompute_share" in shown and "floor_ratio" in shown
    assert json.loads(shown.splitlines()[-1])["config"] is None
    monkeypatch.setenv(ENV_VAR, '{"drain_s": 7.5}')
    main([])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["config"]["drain_s"] == 7.5
