"""Rank 0's plan reaches the others, whatever its size: two processes and a real process group."""

from concurrent.futures import ThreadPoolExecutor

from cosched.batch.jsonl.server import free_port

PROGRAM = """
import sys
import numpy as np
import torch.distributed as dist
from cosched.core.plan import EMPTY_PLAN, Plan, PreemptMode, Preemption
from cosched.engine.ranks import Ranks, Shared
from cosched.memory.eviction import Eviction

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
ranks = Ranks(dist.group.WORLD, is_source=rank == 0)
long = "r" * 50
plans = [
    EMPTY_PLAN,
    Plan(prefill={"b": 5, "a": 7}, paused=frozenset({"x", "y"})),
    Plan(preempt=(Preemption(rid="p"), Preemption(rid="q", mode=PreemptMode.RECOMPUTE))),
    Plan(prefill={"a": 7}, promise={"a": 30, "r": 0}, limits={"online": np.float64(0.5)}),
    Plan(paused=frozenset(f"{long}{i}" for i in range(1000))),
    EMPTY_PLAN,
]
evictions = [None, [], [Eviction(3, True)], None, [Eviction(n, False) for n in range(5000)], None]
more = [{}, {"storage": ["a", "b"]}, {}, {}, {"storage": [long]}, {}]
for plan, gone, given_too in zip(plans, evictions, more, strict=True):
    shared = ranks.share(Shared(plan.to_json(), gone, given_too) if rank == 0 else None)
    given = Plan.from_json(shared.plan)
    assert shared.features == given_too, (rank, shared.features)
    assert given == plan, (rank, given)
    assert shared.evictions == gone, (rank, shared.evictions)
    assert list(given.prefill) == list(plan.prefill)
print("equal")
"""


def test_every_rank_gets_the_plan(forks):
    port = str(free_port())
    with ThreadPoolExecutor(2) as threads:
        ran = threads.map(lambda rank: forks.run(PROGRAM, rank, port), "01")
    assert [one.stdout for one in ran] == ["equal\n"] * 2
