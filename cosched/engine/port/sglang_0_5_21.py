"""SGLang 0.5.21, where it differs from other supported versions."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from cosched.engine.port.common import Found, lookup_key, num_own
from cosched.kv.tree import PathNode

__all__ = [
    "CAN_TAKE_BACK",
    "KNOWS_HOST",
    "NO_DP_ATTENTION",
    "PAGES_NEED_TRITON",
    "SHARES_PAGES",
    "can_cut",
    "can_tell_path",
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

NO_DP_ATTENTION: tuple[str, object] = ("enable_dp_attention", False)
"""The argument without which attention is not data-parallel, and its value then."""

KNOWS_HOST = False
"""cosched cannot say what this version copies to host memory and gives up there."""

PAGES_NEED_TRITON = True
"""Pages of KV are allocated by Triton kernels also on a CPU, where they do not run."""

SHARES_PAGES = False
"""Not tried with its allocator."""


CAN_TAKE_BACK = False


def holds_memory(req: Any) -> bool:
    raise NotImplementedError("SGLang 0.5.21: iterations cannot be taken back")


def release_whatever(tree: Any, req: Any) -> None:
    raise NotImplementedError("SGLang 0.5.21: iterations cannot be taken back")


def can_tell_path(core: Any) -> bool:
    """Whether a tree core shows the nodes above another: the Rust core does not."""
    return isinstance(core, UnifiedTreeCore)


def path_of(core: Any, node_id: int) -> list[PathNode]:
    """The nodes from the root, which is left out, to this one."""
    node, upwards = core.node_by_id(node_id), []
    while node.parent is not None:
        upwards.append(node)
        node = node.parent
    path, end = [], 0
    for node in reversed(upwards):
        start, end = end, end + len(node.key)
        path.append(PathNode(node.id, start, end))
    return path


def num_prefix(req: Any) -> int:
    """Tokens at its head whose KV its next chunk finds."""
    return len(req.prefix_indices)


def can_cut(req: Any) -> bool:
    """Whether its prompt may be computed in chunks. What goes into no tree (beams) begins anew with
    each."""
    return not req.skip_radix_cache_insert


def reserves_whole_output(req: Any) -> bool:
    """Whether all of the output to come is kept free for it, and not a share."""
    return False


def find(tree: Any, req: Any) -> Found:
    """What the tree holds of a request, host memory included."""
    found = tree.match_prefix(MatchPrefixParams(key=lookup_key(req)))
    return Found(len(found.device_indices), int(found.host_hit_length), found.last_device_node)


def gain_of_stopping(tree: Any, req: Any) -> int:
    """KV tokens that stopping a running request would leave free or evictable; measured by
    releasing its lock on the tree for a moment."""
    before: int = tree.evictable_size()
    tree.unpin(req)
    shared: int = tree.evictable_size() - before
    req.lock_receipt = tree.inc_lock_ref(req.last_node).to_dec_params()
    return num_own(req) + shared


def release(tree: Any, req: Any, *, keep: bool) -> None:
    """Give back the memory of a running request. keep: the tree first takes its prompt and the
    generated tokens; they stay as evictable nodes, and all but the last token is matched there when
    it resumes."""
    release_kv_cache(req, tree, is_insert=keep)


def send_abort(scheduler: Any, answer: Any, req: Any) -> None:
    """Answer a request that ends outside the stream of outputs."""
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, req)
