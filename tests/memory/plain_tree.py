"""A tree of KV without an engine, for policies of eviction: contexts come, are evicted, and have
requests that wait for them. Nodes are not split."""

from __future__ import annotations

from cosched.memory.eviction import Leaves
from cosched.memory.node import KvNode


class PlainNode(KvNode):
    def __init__(self, node_id, parent, tokens):
        self.id, self.parent, self.tokens = node_id, parent, tuple(tokens)
        self.start = 0 if parent is None else parent.end
        self.num_tokens = len(self.tokens)
        self.children = {}
        self.holds = 0
        self.device, self.host = True, False

    node_id = property(lambda self: self.id)
    on_device = property(lambda self: self.device)
    on_host = property(lambda self: self.host)
    num_holds = property(lambda self: self.holds)
    num_below = property(lambda self: sum(child.device for child in self.children.values()))


class PlainTree:
    """nodes: all but the root, by number."""

    def __init__(self, leaves: Leaves, copies: Leaves | None = None) -> None:
        self.nodes: dict[int, PlainNode] = {}
        self._leaves, self._copies = leaves, copies
        self._root = PlainNode(0, None, ())
        self._awaited: dict[str, PlainNode] = {}
        self._num_uses = 0
        self._ever: list[PlainNode] = []

    @property
    def num_evictable(self):
        nodes = self.nodes.values()
        return sum(n.num_tokens for n in nodes if n.on_device and not n.num_holds)

    def add(self, tokens, *, chunk, is_online=False):
        """A request has computed these tokens: chunks that are not there are new. The id of the
        last node."""
        for node in self._walk(tokens, chunk, grow=True):
            last = node
        self._num_uses += 1
        for node in last.upwards():
            node.last_use = self._num_uses
            node.is_online |= is_online
            self._place(node)
        return last.node_id

    def _walk(self, tokens, chunk=None, *, grow=False):
        node, position = self._root, 0
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                if not grow:
                    return
                child = PlainNode(len(self._ever) + 1, node, tokens[position : position + chunk])
                self._ever.append(child)
                node.children[tokens[position]] = self.nodes[child.node_id] = child
            position += child.num_tokens
            yield child
            node = child

    def _place(self, node):
        is_leaf = node.on_device and not node.num_holds and not node.num_below
        (self._leaves.add if is_leaf else self._leaves.discard)(node)
        if self._copies is not None:
            is_spare = node.on_host and (node.on_device or not (node.children or node.num_holds))
            (self._copies.add if is_spare else self._copies.discard)(node)

    def _place_all(self, node):
        for above in node.upwards():
            self._place(above)

    def hold(self, node_id):
        for node in self.nodes[node_id].upwards():
            node.holds += 1
            self._place(node)

    def left(self, node_id, visit):
        for node in self.nodes[node_id].upwards():
            node.visit = visit
            self._place(node)

    def refer(self, tokens, by=1):
        """An offline request waits that begins with these tokens."""
        for node in self._walk(tokens):
            rest = tokens[node.start : node.end]
            node.refer(sum(a == b for a, b in zip(rest, node.tokens, strict=False)), by)
            self._place(node)

    def expect(self, key, tokens):
        """An online request waits that begins with these tokens."""
        for node in self._walk(tokens):
            if node.tokens != tuple(tokens[node.start : node.end]):
                break
            node.awaiting += 1
            self._awaited[key] = node
            self._place(node)

    def no_longer_expect(self, key):
        for node in self._awaited.pop(key).upwards():
            node.awaiting -= 1
            self._place(node)

    def evict(self, node_id):
        """From the device; a copy stays."""
        node = self.nodes[node_id]
        node.device = False
        self._place(node)
        if not node.on_host:
            del self.nodes[node_id]
            del node.parent.children[node.tokens[0]]
        self._place_all(node.parent)

    def copy(self, node_id):
        """To host memory."""
        self.nodes[node_id].host = True
        self._place(self.nodes[node_id])
