"""SGLang's allocator with shared pages, under random operations with a full audit."""

import os
import random
from types import SimpleNamespace

import torch

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.papers.bros.sglang_pages import BidirectionalAllocator, allocate_for, free_row
from tests.crossed import crossed

NUM_OPERATIONS = int(os.environ.get("COSCHED_PAGE_OPERATIONS", "2000"))

NUM_ROWS, WIDTH = 12, 400


class Pool:
    """KV whose content is a number for each slot."""

    def __init__(self, num_slots):
        self.content = torch.zeros(num_slots, dtype=torch.int64)

    def move_kv_cache(self, target, source):
        assert not set(target.tolist()) & set(source.tolist())
        self.content[target] = self.content[source]


class Rows:
    def __init__(self):
        self.req_to_token = torch.zeros((NUM_ROWS, WIDTH), dtype=torch.int32)

    def write(self, place, slots):
        self.req_to_token[place] = slots


class Machine:
    """What a scheduler does with the allocator: requests begin (with a head from the tree or
    without), go on with a chunk, decode together, are stopped (whole pages go into the tree) or
    dropped; the tree is evicted page by page when an allocation asks for it."""

    def __init__(self, *, page_size, num_pages, seed):
        self.draw = random.Random(seed)
        self.page_size = page_size
        self.num_pages = num_pages
        self.pool = Pool((num_pages + 1) * page_size)
        self.allocator = BidirectionalAllocator(
            num_pages * page_size, page_size, torch.float32, "cpu", self.pool, False
        )
        self.rows = Rows()
        self.tree = []  # whole pages: slots in the order of their tokens
        self.reqs = {}
        self.num_tokens = 0
        self.num_shared = self.num_short = 0
        self.token_to_kv_pool_allocator = self.allocator
        self.req_to_token_pool = self.rows

    # --- As a tree cache ---

    def supports_prefix_sharing(self):
        return True

    def evict_for_alloc(self, params):
        target = self.allocator.available_size() + params.num_tokens
        while self.allocator.available_size() < target and self.tree:
            self.allocator.free_segment(self.tree.pop(), start_pos=0)

    # --- Operations ---

    def batch(self, reqs):
        return SimpleNamespace(
            reqs=reqs,
            tree_cache=self,
            req_to_token_pool=self.rows,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx for req in reqs]),
        )

    def extend(self, wanted):
        """wanted: requests and their new tokens. As in SGLang, the rows are then written again as
        they were before the allocation."""
        reqs = [req for req, _ in wanted]
        need = sum(n // self.page_size + 2 for _, n in wanted) * self.page_size
        if need > self.allocator.available_size() + len(self.tree) * self.page_size:
            self.num_short += 1
            return
        starts = torch.tensor([len(req.tokens) for req in reqs])
        ends = starts + torch.tensor([n for _, n in wanted])
        heads = [self.rows.req_to_token[r.kv.req_pool_idx, : len(r.tokens)].clone() for r in reqs]
        last = torch.tensor([int(head[-1]) if len(head) else -1 for head in heads])

        def alloc(batch):
            return self.allocator.alloc_extend(
                starts, starts, ends, ends, last, int((ends - starts).sum())
            )

        slots = allocate_for(alloc, self.batch(reqs))
        for req, head, (_, n) in zip(reqs, heads, wanted, strict=True):
            self.rows.req_to_token[req.kv.req_pool_idx, : len(head)] = head
            mine, slots = slots[:n], slots[n:]
            self.append(req, mine)
        assert not len(slots)

    def append(self, req, slots):
        tokens = list(range(self.num_tokens + 1, self.num_tokens + 1 + len(slots)))
        self.num_tokens += len(slots)
        start = len(req.tokens)
        self.rows.req_to_token[req.kv.req_pool_idx, start : start + len(slots)] = slots.int()
        self.pool.content[slots] = torch.tensor(tokens)
        req.tokens += tokens

    def begin(self):
        free = sorted(set(range(NUM_ROWS)) - self.reqs.keys())
        wanted = []
        for row in free[: self.draw.randint(1, 2)]:
            req = SimpleNamespace(
                kv=SimpleNamespace(req_pool_idx=row),
                priority=self.draw.choice([None, 0, -1, -1]),
                beam_group=None,
                session=object() if self.draw.random() < 0.1 else None,
                input_embeds=None,
                tokens=[],
                num_protected=0,
            )
            wanted.append((req, self.draw.randint(1, 3 * self.page_size)))
        before = self.num_short
        if wanted:
            self.extend(wanted)
        if self.num_short == before:
            self.reqs |= {req.kv.req_pool_idx: req for req, _ in wanted}

    def chunk(self):
        reqs = [req for req in self.reqs.values() if len(req.tokens) < WIDTH // 2]
        if reqs:
            self.extend([(self.draw.choice(reqs), self.draw.randint(1, 2 * self.page_size))])

    def decode(self):
        reqs = [req for req in self.reqs.values() if len(req.tokens) < WIDTH - 1]
        reqs = [req for req in reqs if self.draw.random() < 0.8]
        opened = sum(not len(req.tokens) % self.page_size for req in reqs)
        self.allocator.evict_to_free_tokens(self, opened * self.page_size)
        if not reqs or self.allocator.available_size() < opened * self.page_size:
            self.num_short += bool(reqs)
            if self.reqs:
                self.stop()
            return
        ends = torch.tensor([len(req.tokens) + 1 for req in reqs])
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        last = self.rows.req_to_token[rows, ends - 2].long()

        def alloc(batch):
            return self.allocator.alloc_decode(ends, ends, last)

        slots = allocate_for(alloc, self.batch(reqs))
        assert slots is not None, "pages were to be parted and none was kept for it"
        for req, slot in zip(reqs, slots, strict=True):
            self.append(req, slot[None])

    def publish(self):
        """Whole pages go into the tree, as between two chunks."""
        if self.reqs:
            self.insert(self.draw.choice(list(self.reqs.values())))

    def insert(self, req):
        whole = len(req.tokens) // self.page_size * self.page_size
        req.num_protected = max(whole, req.num_protected)

    def stop(self):
        req = self.reqs.pop(self.draw.choice(list(self.reqs)))
        if self.draw.random() < 0.6:
            self.insert(req)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        for start in range(0, req.num_protected, self.page_size):
            self.tree.append(row[start : start + self.page_size].long().clone())
        # The engine may have allocated one token too many.
        owned = max(len(req.tokens) - self.draw.choice([0, 0, 1]), req.num_protected)

        def free(cache, kv, ranges):
            for start, end in ranges:
                self.allocator.free_segments([(row[start:end].long(), start)])

        ceil = -(-owned // self.page_size) * self.page_size
        ranges = [(req.num_protected, owned)]
        if self.draw.random() < 0.3:
            self.allocator.free_group_begin()
        free_row(free, self, req.kv, ranges)
        if ceil < len(req.tokens):
            free_row(free, self, req.kv, [(ceil, len(req.tokens))])
        if self.allocator.free_group is not None:
            self.allocator.free_group_end()

    def step(self):
        operations = (self.begin, self.chunk, self.publish, self.stop, *[self.decode] * 6)
        operation = self.draw.choice(operations)
        if operation != self.stop or self.reqs:
            operation()
        self.audit()

    def audit(self):
        """No slot has two owners, none is lost, and each holds the token that it is for."""
        allocator, page_size = self.allocator, self.page_size
        allocator.table.check_integrity()
        free = allocator.get_all_free_pages().tolist()
        taken = [slots[0].item() // page_size for slots in self.tree]
        owner = {}
        users = {}
        for row, req in self.reqs.items():
            slots = self.rows.req_to_token[row, : len(req.tokens)].long()
            assert self.pool.content[slots].tolist() == req.tokens
            for slot in slots.tolist():
                assert owner.setdefault(slot, row) == row
                users.setdefault(slot // page_size, set()).add(row)
            for start in range(0, len(slots), page_size):
                assert len(set((slots[start : start + page_size] // page_size).tolist())) == 1
        assert len(owner) == sum(len(req.tokens) for req in self.reqs.values())
        pages = [*free, *taken, *users]
        assert sorted(pages) == list(range(1, self.num_pages + 1))
        shared = [rows for rows in users.values() if len(rows) > 1]
        assert len(shared) == allocator.table.num_shared
        for rows in shared:
            online, offline = sorted(rows, key=lambda row: self.reqs[row].priority == -1)
            assert self.reqs[online].priority != -1 and self.reqs[offline].priority == -1
        assert allocator.available_size() <= len(free) * page_size
        self.num_shared += len(shared)


@crossed(page_size=[2, 4, 16, 64], num_pages=[30, 60])
def test_no_slot_is_lost_or_owned_twice(page_size, num_pages):
    machine = Machine(page_size=page_size, num_pages=num_pages, seed=page_size + num_pages)
    for _ in range(NUM_OPERATIONS // 8):
        machine.step()
    while machine.reqs:
        machine.stop()
        machine.audit()
    assert machine.allocator.available_size() == (num_pages - len(machine.tree)) * page_size
    assert machine.num_shared or page_size == 2
    assert machine.allocator.num_parted or page_size == 2
