"""Every invariant of the tree that follows the engine's, asserted in time proportional to it."""

from __future__ import annotations

from collections import Counter


def check_kv_tree(tree, waiting=None):
    """waiting: namespaces and tokens of all that wait, to count references again."""
    seen = set()
    device = evictable = host = 0
    stack = list(tree._roots.values())
    while stack:
        node = stack.pop()
        below = 0
        for page, child in node.children.items():
            assert child.parent is node and child.start == node.end
            assert child.segment[: tree._page_bytes] == page
            assert not len(child.segment) % tree._page_bytes
            assert node.on_device or not child.on_device, f"{child.node_id=}"
            below += child.num_holds
            stack.append(child)
        assert node.num_below == sum(child.on_device for child in node.children.values())
        if node.parent is None:
            continue
        assert node.on_device or node.on_host, f"{node.node_id=} is nowhere"
        assert node.num_holds >= below
        assert tree.nodes[node.node_id] is node
        assert (node.rank is not None) == node.is_leaf
        if tree._copies is not None:
            assert (node.host_rank is not None) == node.has_spare_copy
        seen.add(node.node_id)
        device += node.num_tokens if node.on_device else 0
        host += node.num_tokens if node.on_host else 0
        evictable += node.num_tokens if node.on_device and not node.num_holds else 0
    assert seen == tree.nodes.keys()
    assert evictable == tree.num_evictable
    held_online = [
        n.num_tokens for n in tree.nodes.values() if n.is_online and n.num_holds and n.on_device
    ]
    assert sum(held_online) == tree.num_held_online
    assert device == tree.num_tokens
    assert host == tree.num_on_host
    awaiting = Counter(above for end in tree._awaited.values() for above in end.upwards())
    assert all(node.awaiting == awaiting[node] for node in tree.nodes.values())
    if waiting is not None:
        counted = {n: (node.passing, dict(node.stops)) for n, node in tree.nodes.items()}
        for node in tree.nodes.values():
            node.passing, node.stops = 0, {}
        for namespace, packed in waiting:
            tree.refer(namespace, packed, 1)
        for node_id, node in tree.nodes.items():
            recount = (node.passing, node.stops)
            assert counted[node_id] == recount, f"{node_id=} {counted[node_id]=} {recount=}"
