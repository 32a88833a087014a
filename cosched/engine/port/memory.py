"""What a request holds and finds of SGLang's KV memory."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore

from cosched.engine.port.common import Found, lookup_key, num_own
from cosched.kv.tree import PathNode

__all__ = [
    "find",
    "gain_of_stopping",
    "holds_memory",
    "num_prefix",
    "path_of",
    "release",
    "release_whatever",
    "reserves_whole_output",
    "send_abort",
]


def path_of(core: Any, node_id: int) -> list[PathNode]:
    """The nodes from the root, which is left out, to this one."""
    # The binding of the Rust core gives plain tuples, which its adapter turns into structs.
    if isinstance(core, RustUnifiedTreeCore):
        path = core._binding.collect_path_info([node_id])[0]
        return [PathNode(node[0], node[2], node[3]) for node in path]
    (path,) = core.collect_path_info([node_id])
    return [PathNode(node.node_id, node.path_start, node.path_end) for node in path]


def num_prefix(req: Any) -> int:
    """Tokens at its head whose KV its next chunk finds."""
    return int(req.prefix_len)


def reserves_whole_output(req: Any) -> bool:
    """Whether all of the output to come is kept free for it, and not a share: it cannot end
    early."""
    return bool(req.sampling_params.ignore_eos)


def find(tree: Any, req: Any) -> Found:
    """What the tree holds of a request, host memory included."""
    found = tree.match_prefix(MatchPrefixParams(key=lookup_key(req)))
    return Found(found.device_prefix_len, int(found.host_hit_length), found.last_device_node)


def gain_of_stopping(tree: Any, req: Any) -> int:
    """KV tokens that stopping a running request would leave free or evictable; measured by
    releasing its lock on the tree for a moment."""
    before: int = tree.evictable_size()
    tree.unlock(req.lock)
    shared: int = tree.evictable_size() - before
    req.lock = tree.lock(req.last_node)
    return num_own(req) + shared


def release(tree: Any, req: Any, *, keep: bool) -> None:
    """Give back the memory of a running request. keep: the tree first takes its prompt and the
    generated tokens; they stay as evictable nodes, and all but the last token is matched there when
    it resumes. Not with a Mamba tree, which takes finished requests only."""
    release_kv_cache(req, tree, checkpoint=keep)


def holds_memory(req: Any) -> bool:
    """Whether it holds a row, KV or a lock on the radix tree."""
    return req.lock is not None or bool(req.kv.holds_kv)


def release_whatever(tree: Any, req: Any) -> None:
    """Give back all that a request holds, wherever its iteration was interrupted."""
    kv = req.kv
    if kv.holds_kv:
        # Where allocation failed midway, a row may be there without the tokens behind it.
        kv.kv_committed_len = max(kv.kv_committed_len, kv.cache_protected_len)
        kv.kv_allocated_len = max(kv.kv_allocated_len, kv.kv_committed_len)
        release_kv_cache(req, tree, checkpoint=False)
    elif req.lock is not None:
        tree.unlock(req.lock)
        req.lock = None


def send_abort(scheduler: Any, answer: Any, req: Any) -> None:
    """Answer a request that ends outside the stream of outputs."""
    scheduler.send_abort_output(answer, req)
