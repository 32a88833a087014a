"""Policies from outside the tree: how they are named, and what is refused."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from cosched import policies as registry
from cosched.config import Config
from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.papers.hygen.sarathi import SarathiPolicy
from cosched.policies import GROUP, POLICIES, PolicyEntry, policy_entry, policy_names
from cosched.schedule.base import PolicySettings
from tests.factories import make_caps


class Good:
    """plans nothing at all"""

    def __init__(self, settings):
        self.settings = settings

    initial = None

    def plan(self, view, state):
        raise NotImplementedError


@pytest.fixture
def theirs(monkeypatch):
    """An importable module `theirs`."""
    module = ModuleType("theirs")
    module.Good = Good
    module.Planless = type("Planless", (), {})
    module.entry = PolicyEntry(
        name="x", summary="s", source="theirs", make=lambda settings: SarathiPolicy()
    )
    module.gives_nothing = lambda settings: object()
    module.forgetful = lambda settings: SimpleNamespace(plan=print)
    module.fails = lambda settings: 1 // 0
    module.number = 7
    monkeypatch.setitem(sys.modules, "theirs", module)
    return module


@pytest.fixture
def installed(monkeypatch):
    """Call it with name -> value of entry points of other packages."""

    def install(*named):
        entries = [metadata.EntryPoint(name, value, GROUP) for name, value in named]
        monkeypatch.setattr(registry.metadata, "entry_points", lambda group: entries)
        registry._installed.cache_clear()

    yield install
    monkeypatch.undo()
    registry._installed.cache_clear()


@pytest.fixture(autouse=True)
def forgotten():
    registry._imported.cache_clear()
    yield
    registry._imported.cache_clear()


def settings():
    return PolicySettings(caps=make_caps(), slo=Slo(ttft_s=1.0, tpot_s=0.05))


def test_a_class_is_a_policy(theirs):
    entry = policy_entry("theirs:Good")
    assert (entry.name, entry.summary, entry.timed) == ("theirs:Good", "plans nothing at all", True)
    given = settings()
    assert entry.make(given).settings is given
    assert Config(policy="theirs:Good").policy == "theirs:Good"


def test_an_entry_says_everything_itself(theirs):
    entry = policy_entry("theirs:entry")
    assert (entry.name, entry.timed, entry.pool) == ("theirs:entry", False, None)
    assert isinstance(entry.make(settings()), SarathiPolicy)


def test_an_installed_one_has_a_name_of_its_own(theirs, installed):
    installed(("good", "theirs:Good"))
    assert policy_entry("good").name == "good"
    assert policy_names() == sorted([*POLICIES, "good"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:X", r"cannot import 'no_such_module:X': ModuleNotFoundError"),
        ("theirs:Absent", r"cannot import 'theirs:Absent': AttributeError"),
        ("theirs:", "cannot import|must be a PolicyEntry"),
        (":Good", "cannot import"),
        ("theirs:Planless", r"class Planless has no method plan\(view, state\)"),
        ("theirs:number", r"is int 7; it must be a PolicyEntry"),
        ("hygne", r"unknown policy 'hygne'; choose from .*hygen.*module:Class"),
    ],
)
def test_what_is_no_policy_is_refused(theirs, name, message):
    with pytest.raises(ConfigError, match=message):
        policy_entry(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("theirs:gives_nothing", r"object has no method plan\(view, state\)"),
        ("theirs:forgetful", "SimpleNamespace has no attribute initial"),
        ("theirs:fails", r"'theirs:fails' cannot be built: ZeroDivisionError"),
    ],
)
def test_what_makes_no_policy_is_refused(theirs, name, message):
    with pytest.raises(ConfigError, match=message):
        policy_entry(name).make(settings())


def test_a_name_of_ours_is_not_taken_over(theirs, installed):
    installed(("hygen", "theirs:Good"), ("good", "theirs:Good"))
    with pytest.raises(ConfigError, match="'hygen' is cosched's own"):
        policy_entry("hygen")
    assert policy_entry("sarathi") is POLICIES["sarathi"]


def test_one_name_is_not_taken_twice(theirs, installed):
    installed(("good", "theirs:Good"), ("good", "theirs:entry"))
    with pytest.raises(ConfigError, match="installed more than once"):
        policy_entry("good")
