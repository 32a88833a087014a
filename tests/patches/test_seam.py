"""Hooks into SGLang: if a place is not as expected, the server stops and says why."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched.errors import SeamError
from cosched.versions import SGLANG_VERSION
from cosched_patches.internals import INTERNALS, check_internals
from cosched_patches.seam import (
    ALLOW_VARIABLE,
    after,
    around,
    before,
    check_signatures,
    check_version,
    install,
)
from cosched_patches.seams import SEAMS
from tests.serving import ROOT, SEARCH_PATH


@pytest.fixture
def registry():
    """SGLang's global registry, restored after the test."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks, patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    yield HookRegistry
    HookRegistry._hooks.clear()
    HookRegistry._hooks.update(hooks)
    HookRegistry._patched.clear()
    HookRegistry._patched.update(patched)


@pytest.fixture
def toy(monkeypatch):
    """A module that is hooked instead of SGLang."""
    module = ModuleType("toy")

    class Engine:
        def __init__(self, size):
            self.size = size

        def step(self, batch, *, limit=0):
            return [*batch, self.size]

        def run(self, batch):
            return batch

    module.Engine = Engine
    module.double = lambda value: value * 2
    monkeypatch.setitem(sys.modules, "toy", module)
    return module


def pass_on(original, *args, **kwargs):
    return original(*args, **kwargs)


def seam(target, parameters="self, batch, limit", hook=pass_on):
    return around(target, parameters, hook)


def refusal(function, *args):
    with pytest.raises(SeamError) as caught:
        function(*args)
    message = str(caught.value)
    assert f"supports sglang {SGLANG_VERSION}." in message
    assert "\n" not in message
    return message


class TestSignature:
    def test_as_expected(self, toy):
        check_signatures([seam("toy.Engine.step"), seam("toy.double", "value")])

    @pytest.mark.parametrize(
        "parameters", ["self, batch", "batch, limit", "self, limit, batch", "self, batch, lim", ""]
    )
    def test_changed(self, toy, parameters):
        message = refusal(check_signatures, [seam("toy.Engine.step", parameters)])
        assert "SGLang seam toy.Engine.step" in message
        assert f"expected ({parameters}), found (self, batch, limit)" in message

    @pytest.mark.parametrize("target", ["toy.Engine.stop", "toy.Motor.step", "no_such.module.step"])
    def test_gone(self, toy, target):
        message = refusal(check_signatures, [seam(target)])
        assert f"SGLang seam {target}" in message
        assert "expected (self, batch, limit), found nothing there" in message


class TestInstall:
    def test_every_kind_works(self, toy, registry):
        def and_zero(original, *args, **kwargs):
            return [*original(*args, **kwargs), 0]

        install(
            [
                after("toy.Engine.step", "self, batch, limit", lambda result, *_: result[1:]),
                before("toy.double", "value", lambda value: ((value + 1,), {})),
                around("toy.Engine.run", "self, batch", and_zero),
            ]
        )
        assert toy.Engine(4).step([1, 2]) == [2, 4]
        assert toy.double(3) == 8
        assert toy.Engine(4).run([1, 2]) == [1, 2, 0]

    def test_modules_that_imported_a_function_get_the_hooked_one(self, toy, registry, monkeypatch):
        user = ModuleType("user")
        user.double, user.Engine = toy.double, toy.Engine
        monkeypatch.setitem(sys.modules, "user", user)
        plus_one = lambda result, *args, **kwargs: result + 1  # noqa: E731
        then = lambda result, *args, **kwargs: [*result, "then"]  # noqa: E731
        install(
            [
                after("toy.double", "value", plus_one),
                after("toy.Engine.step", "self, batch, limit", then),
            ]
        )
        assert user.double(3) == 7
        assert user.Engine(4).step([1]) == [1, 4, "then"]

    def test_nothing_is_hooked_when_one_signature_is_wrong(self, toy, registry):
        step = toy.Engine.step
        refusal(install, [seam("toy.Engine.step"), seam("toy.double", "number")])
        assert toy.Engine.step is step

    def test_hook_that_sglang_failed_to_apply(self, toy, registry, monkeypatch):
        def fail(target, hooks):
            raise RuntimeError("SGLang logs this and goes on")

        monkeypatch.setattr(registry, "_apply_target", fail)
        message = refusal(install, [seam("toy.Engine.step")])
        assert "SGLang seam toy.Engine.step" in message
        assert "expected a hook of kind 'around' in place, found the stock code" in message


class TestSeams:
    def test_fit_the_installed_sglang(self):
        check_signatures(SEAMS)

    def test_no_place_is_hooked_twice(self):
        found = [each.target for each in SEAMS]
        assert len(found) == len(set(found))

    def test_are_documented(self):
        for each in SEAMS:
            assert each.target.startswith(("sglang.", "uvicorn.")), each
            assert each.kind in ("before", "after", "around"), each
            assert re.search(r"[.)]$", each.hook.__doc__), each


ACTIVE = {ENV_VAR: json.dumps({"policy": "sarathi"})}

CHANGED_SGLANG = """
    import cosched.bootstrap
    from sglang.srt.managers.scheduler import Scheduler

    def _get_new_batch_prefill_raw(self, running_batch, new_in_this_version):
        raise AssertionError("called")

    Scheduler._get_new_batch_prefill_raw = _get_new_batch_prefill_raw
"""


def assert_stopped(done):
    assert done.returncode == 1, done.stdout + done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(
        "cosched: SGLang seam "
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw: "
        "expected (self, prefill_delayer_single_pass, running_batch), "
        "found (self, running_batch, new_in_this_version). This is sglang "
    ), done.stderr


class TestVersion:
    def test_ours_passes(self):
        check_version()

    @pytest.mark.parametrize("allowed", [None, "0.5.23", "1", "", "all"])
    def test_another_is_refused_unless_exactly_it_is_allowed(self, monkeypatch, allowed):
        monkeypatch.setattr("sglang.version.__version__", "0.5.24")
        monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
        if allowed is not None:
            monkeypatch.setenv(ALLOW_VARIABLE, allowed)
        message = refusal(check_version)
        assert "This is sglang 0.5.24" in message and f"set {ALLOW_VARIABLE}=0.5.24" in message

    def test_it_is_allowed_with_a_warning(self, monkeypatch):
        said = []
        logger = logging.getLogger("cosched")
        monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
        monkeypatch.setattr("sglang.version.__version__", "0.5.24")
        monkeypatch.setenv(ALLOW_VARIABLE, "0.5.24")
        check_version()
        assert "UNTESTED" in said[0] and "0.5.24" in said[0]


class TestInternals:
    def test_all_are_there(self):
        check_internals(INTERNALS)

    def test_one_that_is_gone_is_named(self):
        for target in INTERNALS:
            message = refusal(check_internals, {target: (*INTERNALS[target], "no_such_thing")})
            assert f"{target} has no no_such_thing" in message

    def test_a_class_that_is_gone_is_named(self):
        assert "nowhere.Thing is gone" in refusal(check_internals, {"nowhere.Thing": ("a",)})

    @pytest.mark.parametrize(
        ("owner", "names"),
        [
            ("Scheduler", r"_?scheduler"),
            ("Req", r"req|chunked_req"),
            ("ScheduleBatch", r"(?:running_)?batch"),
            ("UnifiedRadixCache", r"tree(?:_cache)?"),
        ],
    )
    def test_the_list_is_whole(self, owner, names):
        """The list has every attribute that the engine uses under these names."""
        [listed] = [set(v) for k, v in INTERNALS.items() if k.rpartition(".")[2] == owner]
        used = set()
        for path in (ROOT / "cosched" / "engine").rglob("*.py"):
            # These build engines with SGLang's public constructors.
            if path.stem not in ("local", "cpu"):
                used |= set(re.findall(rf"(?<!cosched\.)\b(?:{names})\.(\w+)", path.read_text()))
        own = {
            "cosched",
            *(
                f"cosched_{name}"
                for name in ("faults", "members", "observer", "offline", "prefill", "prefix_key")
            ),
            "cosched_decode_role",
            "cosched_grammar_s",
            "cosched_taken_back",
        }
        assert used - own <= listed, f"add to INTERNALS: {sorted(used - own - listed)}"


class TestProcess:
    """Each in its own process: SGLang's plugin state cannot be undone."""

    @pytest.mark.parametrize("module", ["sglang.launch_server", "cosched.launch_server"])
    def test_changed_sglang_stops_the_server(self, forks, module, tiny_model):
        code = textwrap.dedent(CHANGED_SGLANG) + textwrap.dedent(
            f"""
            import runpy, sys
            from sglang.srt.entrypoints.engine import Engine

            Engine._launch_subprocesses = lambda *args, **kwargs: print("went on")
            sys.argv[0] = {module!r}
            runpy.run_module({module!r}, run_name="__main__")
            """
        )
        done = forks.run(code, "--model-path", str(tiny_model), env=ACTIVE)
        assert_stopped(done)
        assert "went on" not in done.stdout

    def test_wrong_configuration_stops_the_process(self, forks):
        code = """
            from sglang.srt.plugins import load_plugins
            load_plugins()
        """
        done = forks.run(code, env={ENV_VAR: "{1}"})
        assert done.returncode == 1
        assert "cosched: COSCHED_CONFIG: " in done.stderr.strip().splitlines()[-1]

    def test_the_plugin_that_is_switched_off_imports_nothing_of_sglang(self):
        code = """
            import sys
            import cosched_patches.internals, cosched_patches.plugin, cosched_patches.seam

            cosched_patches.plugin.register()
            print(sorted({name.split(".")[0] for name in sys.modules} & {"sglang", "torch"}))
        """
        env = os.environ | {"PYTHONPATH": SEARCH_PATH, ENV_VAR: ""}
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
        assert subprocess.check_output(command, env=env, cwd=ROOT, text=True).strip() == "[]"
