"""Every invariant of what cosched keeps of SGLang's tree, asserted in time proportional to it."""

from __future__ import annotations

from collections import Counter


def check_tree(core, waiting=None, *, writing=(), loading=()):
    """waiting: keys of all offline requests that wait, to count references again; writing, loading:
    nodes that are being copied to and from host memory."""
    if core.is_write_back or not loading:  # SGLang's own; wrong during a load with write-through
        core.sanity_check([(n, n) for n in writing], [(n, n) for n in loading])
    nodes = [node for node in core.nodes.values() if node is not core.root_node]
    held_online = 0
    for node in nodes:
        assert node.is_linked
        assert node.num_tokens == len(node.key) > 0
        assert node.start == node.parent.end
        assert node.num_holds >= sum(child.num_holds for child in node.children.values())
        assert (node.rank is not None) == (node in core.evictable_device_leaves)
        if node.is_online and node.num_holds and node.on_device:
            held_online += node.num_tokens
    assert held_online == core.num_held_online
    assert len(core._leaves) == len(core.evictable_device_leaves)
    readers = core._readers
    awaiting = Counter(above for end in readers._awaited.values() for above in end.upwards())
    assert all(node.awaiting == awaiting[node] for node in nodes)
    copies = getattr(core, "_copies", None)
    if copies is not None:
        for node in nodes:
            can_go = node in core.evictable_host_leaves or (
                core.is_write_back and core._is_settled_full_host_duplicate(node)
            )
            assert node.host_rank is not None or not can_go, f"{node.node_id=}"
            assert node.host_rank is None or node.on_host
    if waiting is not None:
        counted = {node: (node.passing, dict(node.stops)) for node in nodes}
        for node in nodes:
            node.passing, node.stops = 0, {}
        for key in waiting:
            readers.refer(core.root_node, key, 1)
        for node in nodes:
            recount = (node.passing, dict(node.stops))
            assert counted[node] == recount, f"{node.node_id=} {counted[node]=} {recount=}"
