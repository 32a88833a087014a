"""Process time of taking slots for the next token of each running request, on the CPU.

    python -m tests.engine.time_pages

Prints a line for SGLang's allocator and for the one with shared pages, without and with pages that
are shared (little memory).
"""

import time
from types import SimpleNamespace

import torch

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.port.bidirectional import BidirectionalAllocator, allocate_for

NUM_REQUESTS, NUM_STEPS, PAGE_SIZE, NUM_TOKENS = 200, 300, 16, 500


class Pool:
    def move_kv_cache(self, target, source):
        pass


def measure(allocator_class, num_spare_pages):
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    allocator_class = allocator_class or PagedTokenToKVPoolAllocator
    most = (NUM_TOKENS + NUM_STEPS) // PAGE_SIZE + 1
    num_pages = NUM_REQUESTS * most + num_spare_pages
    allocator = allocator_class(
        num_pages * PAGE_SIZE, PAGE_SIZE, torch.float32, "cpu", Pool(), False
    )
    reqs = [
        SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=row),
            priority=-(row % 2),
            beam_group=None,
            session=None,
            input_embeds=None,
        )
        for row in range(NUM_REQUESTS)
    ]
    rows = torch.zeros((NUM_REQUESTS, 1000), dtype=torch.int32)
    batch = SimpleNamespace(
        reqs=reqs,
        req_pool_indices=torch.arange(NUM_REQUESTS),
        req_pool_indices_cpu=torch.arange(NUM_REQUESTS),
        req_to_token_pool=SimpleNamespace(req_to_token=rows, write=rows.__setitem__),
        tree_cache=SimpleNamespace(
            token_to_kv_pool_allocator=allocator, supports_prefix_sharing=lambda: False
        ),
    )
    ends = NUM_TOKENS + torch.arange(NUM_REQUESTS) * 7 % PAGE_SIZE
    starts = torch.zeros_like(ends)
    slots = allocate_for(
        lambda _: allocator.alloc_extend(starts, starts, ends, ends, starts - 1, int(ends.sum())),
        batch,
    )
    last = slots[ends.cumsum(0) - 1]
    begin = time.process_time()
    for _ in range(NUM_STEPS):
        ends = ends + 1
        last = allocate_for(
            lambda _, ends=ends, last=last: allocator.alloc_decode(ends, ends, last), batch
        )
    spent_s = time.process_time() - begin
    return spent_s / NUM_STEPS, getattr(allocator, "num_parted", 0) / NUM_STEPS


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, allocator_class, num_spare in (
        ("stock", None, 0),
        ("nothing shared", BidirectionalAllocator, 1000),
        ("shared", BidirectionalAllocator, 0),
    ):
        seconds, parted = measure(allocator_class, num_spare)
        print(f"{name}: {seconds * 1e6:.0f} us, {parted:.1f} tails copied")
