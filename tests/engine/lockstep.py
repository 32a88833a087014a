"""One rank of DP attention, or one stage of a pipeline: a real scheduler that steps together with
those of other processes.

``python -m tests.engine.lockstep RANK TASK``; TASK is a file of JSON:

    flags, config  of the engine; config: null for stock SGLang
    num_ranks      tensor-parallel ranks
    num_stages     of a pipeline (1); with more there are no ranks
    requests       for each rank of DP attention: [id, prompt, output tokens, priority, iteration];
                   one list: tensor parallelism alone
    aborts         the same: [id, iteration]
    limits         the same: [limits of offline work, iteration]
    stops          share of plans that preempt a running request as well

Prints JSON: output ids by request, what the controller counted, and the pages that two classes
shared (BROS), summed over iterations.
"""

import json
import os
import random
import sys

from msgspec.structs import replace

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched.engine.read_state import state_of


def main(rank, task):
    os.environ[ENV_VAR] = "" if task["config"] is None else json.dumps(task["config"])
    import torch
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.model_loader import loader

    from cosched.core.view import OfflineLimits
    from cosched.engine.offline_gate import limits_to_message
    from cosched.lab.local_engine import LocalEngine
    from tests.engine.tiny_models import randomize

    loader.initialize_dummy_weights = randomize
    num_stages = task.get("num_stages", 1)
    dp_rank = 0 if num_stages > 1 else rank * len(task["requests"]) // task["num_ranks"]
    is_dp = num_stages == 1 and len(task["requests"]) > 1
    engine = LocalEngine(task["flags"], rank=rank, dp_rank=dp_rank if is_dp else None)
    scheduler = engine.scheduler
    controller = getattr(scheduler, "cosched", None)
    if controller is not None and controller.planner is not None and task.get("stops"):
        _preempt_also(controller.planner, task["stops"], seed=dp_rank)
    actions = {}
    for rid, prompt, num_tokens, priority, iteration in task["requests"][dp_rank]:
        actions.setdefault(iteration, []).append(
            lambda rid=rid, prompt=prompt, num=num_tokens, priority=priority: engine.submit(
                rid, prompt, max_new_tokens=num, priority=priority
            )
        )
    for rid, iteration in task.get("aborts", [[]] * (dp_rank + 1))[dp_rank]:
        actions.setdefault(iteration, []).append(lambda rid=rid: engine.abort(rid))
    for limits, iteration in task.get("limits", [[]] * (dp_rank + 1))[dp_rank]:
        message = SetInternalStateReq(server_args=limits_to_message(OfflineLimits(**limits)))
        actions.setdefault(iteration, []).append(lambda message=message: engine.send(message))
    number, last = 0, max(actions, default=0)
    pages = getattr(scheduler.token_to_kv_pool_allocator, "table", None)
    shared_pages = 0

    def until():
        nonlocal number, shared_pages
        shared_pages += 0 if pages is None else pages.num_shared
        for act in actions.pop(number, ()):
            act()
        number += 1
        assert number < 20_000, "the ranks are not idle"
        is_done = number > last and not engine._inbox and scheduler.is_fully_idle()
        left = torch.tensor([not is_done], dtype=torch.int64)
        torch.distributed.all_reduce(left, group=scheduler.tp_cpu_group)
        return not left.item()

    engine.run(until)
    told = {
        "outputs": {rid: reply.output_ids for rid, reply in engine.replies.items()},
        "ends": {rid: reply.finish_reason for rid, reply in engine.replies.items()},
        "free": scheduler.token_to_kv_pool_allocator.available_size()
        + scheduler.tree_cache.evictable_size(),
        "total": scheduler.max_total_num_tokens,
        "iterations": number,
        "shared_pages": shared_pages,
    }
    if controller is not None:
        told["state"] = state_of(controller).to_dict()
        told["observed"] = controller.predictor.describe()["num_observed"]
    print(json.dumps(told), flush=True)
    os._exit(0)  # the process groups end with the processes


def _preempt_also(planner, share, seed):
    """Some plans preempt one more running request."""
    from cosched.core.plan import Preemption

    chosen = random.Random(seed)
    original = planner.plan

    def plan(running_batch, look, *, instead=None):
        iteration = original(running_batch, look, instead=instead)
        made = iteration.plan
        gone = {p.rid for p in made.preempt} | made.paused
        able = [r.rid for r in running_batch.reqs if r.rid not in gone and not r.finished()]
        if instead is None and able and chosen.random() <= share:
            more = Preemption(rid=chosen.choice(able))
            iteration.plan = replace(made, preempt=(*made.preempt, more))
        return iteration

    planner.plan = plan


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        main(int(sys.argv[1]), json.load(file))
