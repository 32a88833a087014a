"""SGLang's own server tests (`sglang.test.kits`, in its wheel), and scripts for its scripted
runtime (`tests.scripted`), against stock and against cosched.

    python -m tests.upstream              # both; prints every outcome, and where they differ

The model is small and has random weights, so kits that measure a model's quality are left out, and
tests in `NEEDS_A_MODEL` fail on both: they expect answers, or a longer context. A test that fails
on cosched only must be in `BY_DESIGN`, with the reason.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import unittest
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import openai
from transformers import AutoTokenizer

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched.lab.demo_model import ensure_demo_model
from tests.serving import start_server

KITS = {
    "AbortAllMixin": "abort_timeout_kit",
    "BasicAPIContractMixin": "basic_api_contract_kit",
    "BasicDecodeCorrectnessMixin": "basic_decode_correctness_kit",
    "BasicSchedulerStressMixin": "basic_scheduler_stress_kit",
    "EBNFConstrainedMixin": "ebnf_constrained_kit",
    "JSONConstrainedMixin": "json_constrained_kit",
    "JSONModeMixin": "json_mode_kit",
    "MatchedStopMixin": "matched_stop_kit",
    "PauseResumeInPlaceMixin": "pause_generation_kit",
    "RegexConstrainedMixin": "regex_constrained_kit",
    "StreamingSessionKitMixin": "streaming_session_kit",
}

QUICK = (
    "BasicAPIContractMixin",
    "MatchedStopMixin",
    "PauseResumeInPlaceMixin",
    "RegexConstrainedMixin",
)

NEEDS_A_MODEL = frozenset(
    f"{kit}.test_{test}"
    for kit, tests in {
        "BasicDecodeCorrectnessMixin": "basic_math capital_france color_completion",
        "BasicSchedulerStressMixin": "concurrent_requests streaming_response",
        "EBNFConstrainedMixin": "ebnf_generate_complex_json ebnf_generate_custom_log_format",
        "JSONConstrainedMixin": "json_generate json_openai mix_json_and_other",
        "JSONModeMixin": "json_mode_response json_mode_with_streaming",
        "MatchedStopMixin": "finish_stop_eos",
        "RegexConstrainedMixin": "regex_generate_complex_json regex_generate_custom_log_format",
        "StreamingSessionKitMixin": "first_mid_abort_recovery nth_mid_abort_recovery",
    }.items()
    for test in tests.split()
)

BY_DESIGN: dict[str, str] = {}
"""Test -> why cosched fails it."""

FLAGS = ("--max-running-requests", "32", "--enable-streaming-session")


def _tests(server: Any, kits: Iterable[str]) -> Iterator[unittest.TestCase]:
    path = str(server.model_path)
    told = {
        "base_url": server.url,
        "process": server.process,
        "model": path,
        "tokenizer": AutoTokenizer.from_pretrained(path),
        "client": openai.Client(api_key="none", base_url=f"{server.url}/v1"),
        "abort_all_max_new_tokens": 3000,
    }
    for name in kits:
        kit = getattr(importlib.import_module(f"sglang.test.kits.{KITS[name]}"), name)
        case = type(name, (kit, unittest.TestCase), told)
        yield from unittest.defaultTestLoader.loadTestsFromTestCase(case)


def outcomes(
    server: Any, kits: Iterable[str] = tuple(KITS), *, without: Collection[str] = ()
) -> dict[str, str]:
    """Test -> "passed", or the last line of why not."""
    found = {}
    for test in _tests(server, kits):
        name = f"{type(test).__name__}.{test._testMethodName}"
        if name in without:
            continue
        result = unittest.TestResult()
        test.run(result)
        why = [text.strip().splitlines()[-1] for _, text in (*result.failures, *result.errors)]
        why += [f"skipped: {reason}" for _, reason in result.skipped]
        found[name] = why[0] if why else "passed"
    return found


def scripted(policy: str) -> dict[str, str]:
    """The same of `tests.scripted`."""
    from tests.scripted import Scripts

    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # it is looked into
    os.environ[ENV_VAR] = "" if policy == "sglang" else json.dumps({"policy": policy})

    result = unittest.TestResult()
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(Scripts)
    names = {str(test): f"Scripts.{test._testMethodName}" for test in tests}
    found = dict.fromkeys(names.values(), "passed")
    tests.run(result)
    for test, text in (*result.failures, *result.errors):
        whole = str(getattr(test, "test_case", test))
        found[names.get(whole, whole)] = text.strip().splitlines()[-1]
    del os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"], os.environ[ENV_VAR]
    return found


def main() -> int:
    model = ensure_demo_model(size="tiny", dtype="float32")
    found = {}
    for policy in ("sglang", "cosched"):
        found[policy] = scripted(policy)
        with start_server(model, *FLAGS, "--cosched-policy", policy) as server:
            found[policy] |= outcomes(server)
    passed = {
        policy: {name for name, outcome in all_.items() if outcome == "passed"}
        for policy, all_ in found.items()
    }
    for name, outcome in found["cosched"].items():
        on_stock = found["sglang"][name]
        print(f"{name}: {outcome[:90]}" + (f" (stock: {on_stock[:90]})" * (outcome != on_stock)))
    only_stock = sorted(passed["sglang"] - passed["cosched"] - BY_DESIGN.keys())
    print(f"{len(passed['cosched'])} of {len(found['cosched'])} tests pass on cosched")
    print(f"on stock only: {', '.join(only_stock) or 'none'}")
    return 1 if only_stock else 0


if __name__ == "__main__":
    sys.exit(main())
