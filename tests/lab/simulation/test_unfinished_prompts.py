"""Online prompts that are preempted halfway, where memory is short."""

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import Slo
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of


def write_bursts_of_long_prompts(path):
    """Azure CSV: every 2.5 s chats of some 8,000 tokens, 20 ms apart; two short ones behind."""
    rows = []
    for burst in range(3):
        start_s = 1 + 2.5 * burst
        rows += [(start_s + 0.02 * i, 8000 + 300 * i, 80) for i in range(3)]
        rows += [(start_s + 0.1 + 0.3 * i, 600, 150) for i in range(2)]
    lines = [f"2023-11-16 18:15:{s:010.7f},{prompt},{reply}" for s, prompt, reply in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    return str(path)


@pytest.mark.parametrize(("name", "most_again"), [("bros", 0.02), ("cosched", 0.04)])
def test_long_prompts_are_not_computed_again_where_memory_is_short(tmp_path, name, most_again):
    spec = RunSpec(
        setting=setting_of(name),
        machine=Machine(kv_tokens=26_000, chunk_tokens=512, max_running_requests=32),
        online=WorkloadSpec(name=write_bursts_of_long_prompts(tmp_path / "bursts.csv")),
        offline=WorkloadSpec(name="bros-offline", num_requests=60),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
        duration_s=8.0,
    )
    online = execute(spec).summary.online
    assert online.num_prompt_tokens > 20_000 and online.num_finished >= 5
    assert online.num_recomputed_tokens <= most_again * online.num_prompt_tokens
    assert online.num_preemptions <= online.num_requests
