"""The engine's radix tree as eviction sees it: its nodes, locks on them, and requests that wait for
them.

The engine's own tree is authoritative; this one mirrors each insertion, lock and eviction
(`cosched.engine.tree_core`). It knows beside the tokens what the engine's tree does not:
when a node was last used and by which class, and how many waiting requests will read it.

A node is on the device, in host memory, or both: nothing on the device hangs below what is not.

Costs: *depth* is the number of nodes from the root to a node; a node is one prefill chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from cosched.memory.eviction import Leaves
from cosched.memory.node import KvNode, PathNode, Visit
from cosched.pool.radix import TOKEN_BYTES, Shared, common_bytes


class KvTree:
    """See the module's docstring. Requests of different namespaces share nothing.

    leaves  receives the nodes that can be evicted (`KvNode.is_leaf`)
    copies  receives the copies in host memory that can be given up (`KvNode.has_spare_copy`); None:
            there is no host memory
    future  requests that wait for a path (`PrefixPool.future_references`); asked for new nodes
            only, and only where some wait for what is above them
    """

    def __init__(
        self,
        *,
        page_size: int,
        leaves: Leaves,
        copies: Leaves | None = None,
        future: Callable[[bytes, Hashable], Sequence[Shared]] | None = None,
    ) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._leaves = leaves
        self._copies = copies
        self._future = future
        self.nodes: dict[int, KvNode] = {}
        self._roots: dict[Hashable, KvNode] = {}
        self._awaited: dict[Hashable, KvNode] = {}
        """Of waiting online requests, the last node that each will use."""
        self.num_uses = 0
        self.num_tokens = 0
        """Of all nodes on the device [tokens]."""
        self.num_evictable = 0
        """Of those that are not locked [tokens]."""
        self.num_shifts = 0
        """Times that `gains_of_release` of a lock that stays may have changed."""
        self.num_held_online = 0
        """Of those that are locked, and that an online request has used [tokens]."""
        self.num_on_host = 0
        """Of all copies in host memory [tokens]."""
        self.cut: list[tuple[int, int]] = []
        """Nodes with a copy in host memory that were split since the last look: the new upper
        part, and the lower one, which has kept its number."""

    @property
    def num_held_offline(self) -> int:
        """Of those that are locked, and that no online request has used [tokens]."""
        return self.num_tokens - self.num_evictable - self.num_held_online

    def reset(self) -> None:
        """The engine has dropped its tree."""
        for node in self.nodes.values():
            self._take_out(node)
        self.nodes.clear()
        self._roots.clear()
        self._awaited.clear()
        self.cut.clear()
        self.num_tokens = self.num_evictable = self.num_held_online = self.num_on_host = 0
        self.num_shifts += 1

    # --- Following the engine ---

    def settle(
        self,
        namespace: Hashable,
        path: Sequence[PathNode],
        packed: Callable[[int, int], bytes],
        *,
        is_online: bool | None,
        is_inserted: bool = False,
    ) -> None:
        """The engine has put these tokens into its tree, or looked them up: nodes may be new, or
        split where the tokens part from others, or where a sliding window begins.

        path         from the root to where the tokens end now
        packed       token ids from a position to another, 4 bytes each
        is_online    class of the request that uses them now; None: it is no use
        is_inserted  all of it is on the device now
        """
        first = 0
        while first < len(path) and self._is_known(path[first]):
            first += 1
        parent = self._root(namespace) if first == 0 else self.nodes[path[first - 1].node_id]
        for node_id, start, end in path[first:]:
            parent = self._enter(parent, node_id, start, end, namespace, packed)
        if is_inserted:
            self.loaded([place.node_id for place in path])
        if is_online is None:
            return
        self.num_uses += 1
        number = self.num_uses
        for node in parent.upwards():
            node.last_use = number
            if is_online and not node.is_online:
                node.is_online = True
                if node.num_holds and node.on_device:
                    self.num_held_online += node.num_tokens
            self._changed(node)

    def _is_known(self, place: PathNode) -> bool:
        node = self.nodes.get(place.node_id)
        return node is not None and node.start == place.start and node.end == place.end

    def _root(self, namespace: Hashable) -> KvNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = KvNode(-1, None, 0, b"")
            root.namespace = namespace
        return root

    def _enter(
        self,
        parent: KvNode,
        node_id: int,
        start: int,
        end: int,
        namespace: Hashable,
        packed: Callable[[int, int], bytes],
    ) -> KvNode:
        """A node that was not there before, or that has been split since."""
        assert start == parent.end, f"{node_id=} {start=} {parent.end=}"
        known = self.nodes.get(node_id)
        if known is not None:
            # Its upper part was entered a moment ago, and has cut it.
            assert (known.start, known.end) == (start, end), f"{node_id=} {start=} {end=}"
            return known
        segment = packed(start, end)
        page = segment[: self._page_bytes]
        below = parent.children.get(page)
        if below is not None:
            assert below.segment.startswith(segment), f"{node_id=} is no head of {below.node_id=}"
            return self._split(below, node_id, end - start)
        node = KvNode(node_id, parent, start, segment)
        parent.children[page] = node
        parent.num_below += 1
        self.nodes[node_id] = node
        self.num_tokens += end - start
        self.num_evictable += end - start
        if self._future is not None and (parent.parent is None or parent.passing):
            self._count_future(node, self._future(packed(0, end), namespace))
        self._place(parent)
        self._place(node)
        return node

    def _split(self, lower: KvNode, node_id: int, num_tokens: int) -> KvNode:
        """Cut the first tokens off a node; they are a node of their own above it."""
        parent = lower.parent
        assert parent is not None and 0 < num_tokens < lower.num_tokens, f"{num_tokens=}"
        cut = num_tokens * TOKEN_BYTES
        upper = KvNode(node_id, parent, lower.start, lower.segment[:cut])
        upper.num_holds = lower.num_holds
        upper.on_device, upper.on_host = lower.on_device, lower.on_host
        upper.num_below = int(lower.on_device)
        upper.last_use, upper.is_online, upper.visit = lower.last_use, lower.is_online, lower.visit
        upper.awaiting, upper.keys = lower.awaiting, lower.keys
        upper.passing = lower.passing + sum(
            count for tokens, count in lower.stops.items() if tokens >= num_tokens
        )
        upper.stops = {t: count for t, count in lower.stops.items() if t < num_tokens}
        lower.stops = {t - num_tokens: c for t, c in lower.stops.items() if t > num_tokens}
        parent.children[upper.segment[: self._page_bytes]] = upper
        lower.segment = lower.segment[cut:]
        lower.start += num_tokens
        lower.parent = upper
        upper.children[lower.segment[: self._page_bytes]] = lower
        self.nodes[node_id] = upper
        if upper.on_host:
            self.cut.append((node_id, lower.node_id))
        self._place(upper)
        self._changed(lower)
        return upper

    def hold(self, node_id: int) -> None:
        """The engine has locked a node, and with it all above it. O(depth)."""
        node = self.nodes.get(node_id)
        if node is None:
            return  # a root
        for above in node.upwards():
            above.num_holds += 1
            if above.num_holds == 2:
                self.num_shifts += 1
            elif above.num_holds == 1:
                if above.on_device:
                    self.num_evictable -= above.num_tokens
                    if above.is_online:
                        self.num_held_online += above.num_tokens
                self._place(above)

    def release(self, node_id: int) -> None:
        """Undo a `hold`. O(depth)."""
        node = self.nodes.get(node_id)
        if node is None:
            return
        for above in node.upwards():
            assert above.num_holds > 0, f"{above.node_id=} is not held"
            above.num_holds -= 1
            if above.num_holds == 1:
                self.num_shifts += 1
            elif not above.num_holds:
                if above.on_device:
                    self.num_evictable += above.num_tokens
                    if above.is_online:
                        self.num_held_online -= above.num_tokens
                self._place(above)

    def evicted(self, node_id: int) -> None:
        """The engine has evicted a leaf of which there is no copy in host memory, and what hung
        below it there."""
        node = self.nodes[node_id]
        assert node.is_leaf and not node.on_host, f"{node_id=} is no leaf"
        for below in self.below(node):
            self._remove(below)
        self.num_evictable -= node.num_tokens
        self._remove(node)

    def below(self, node: KvNode) -> list[KvNode]:
        """All below a node, what hangs below another before it. O(their number)."""
        found = []
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            found.append(child)
            stack.extend(child.children.values())
        return found[::-1]

    def _remove(self, node: KvNode) -> None:
        parent = node.parent
        assert parent is not None and not node.children and not node.num_holds, f"{node.node_id=}"
        self._take_out(node)
        if node.awaiting:
            for key in [key for key, end in self._awaited.items() if end is node]:
                self._awaited[key] = parent
        del self.nodes[node.node_id]
        del parent.children[node.segment[: self._page_bytes]]
        if node.on_device:
            parent.num_below -= 1
            self.num_tokens -= node.num_tokens
        if node.on_host:
            self.num_on_host -= node.num_tokens
        self._place(parent)

    def _place(self, node: KvNode) -> None:
        """Bring both orders in line with what can be evicted."""
        if node.is_leaf != (node.rank is not None):
            (self._leaves.discard if node.rank is not None else self._leaves.add)(node)
        copies = self._copies
        if copies is None:
            return
        if node.has_spare_copy != (node.host_rank is not None):
            (copies.discard if node.host_rank is not None else copies.add)(node)
        elif node.host_rank is not None:
            copies.changed(node)

    def _take_out(self, node: KvNode) -> None:
        if node.rank is not None:
            self._leaves.discard(node)
        if node.host_rank is not None and self._copies is not None:
            self._copies.discard(node)

    def _changed(self, node: KvNode) -> None:
        """Something about it that its place may depend on."""
        if node.rank is not None:
            self._leaves.changed(node)
        if node.host_rank is not None and self._copies is not None:
            self._copies.changed(node)

    # --- Host memory ---

    def backed_up(self, node_id: int) -> None:
        """Its KV is, or is just being, copied to host memory."""
        node = self.nodes[node_id]
        assert node.on_device and not node.on_host, f"{node_id=}"
        node.on_host = True
        self.num_on_host += node.num_tokens
        self._place(node)
        self._changed(node)

    def demoted(self, node_id: int) -> None:
        """A leaf was evicted from the device; its copy is left."""
        node = self.nodes[node_id]
        assert node.is_leaf and node.on_host and node.parent is not None, f"{node_id=}"
        node.on_device = False
        node.parent.num_below -= 1
        self.num_tokens -= node.num_tokens
        self.num_evictable -= node.num_tokens
        self._place(node)
        self._place(node.parent)

    def loaded(self, node_ids: Iterable[int]) -> None:
        """These are on the device now, whether or not they were before; from the root downwards."""
        for node_id in node_ids:
            node = self.nodes[node_id]
            if node.on_device:
                continue
            assert node.parent is not None
            node.on_device = True
            node.parent.num_below += 1
            self.num_tokens += node.num_tokens
            if not node.num_holds:
                self.num_evictable += node.num_tokens
            elif node.is_online:
                self.num_held_online += node.num_tokens
            self._place(node.parent)
            self._place(node)

    def copy_dropped(self, node_id: int) -> None:
        """Its copy in host memory is gone, and it with it where that was all."""
        node = self.nodes[node_id]
        assert node.has_spare_copy, f"{node_id=}"
        if not node.on_device:
            self._remove(node)
            return
        node.on_host = False
        self.num_on_host -= node.num_tokens
        self._place(node)
        self._changed(node)

    def num_host_behind(
        self, namespace: Hashable, node_id: int, start: int, packed: Callable[[], bytes]
    ) -> int:
        """Tokens that are found in host memory alone, behind the first `start` ones, which end with
        a node on the device (unknown: with the root). Changes nothing. O(depth + tokens compared).

        packed: all tokens, 4 bytes each; asked for where something may be found
        """
        node: KvNode | None = self.nodes.get(node_id) or self._roots.get(namespace)
        if node is None or node.end != start or len(node.children) == node.num_below:
            return 0
        tokens = packed()
        position = start * TOKEN_BYTES
        page = self._page_bytes
        while True:
            node = node.children.get(tokens[position : position + page])
            if node is None or node.on_device:
                break
            shared = common_bytes(node.segment, tokens, position) // page * page
            position += shared
            if shared < len(node.segment):
                break
        return position // TOKEN_BYTES - start

    # --- What is known beside ---

    def left(self, node_id: int, visit: Visit) -> None:
        """An online request that ended at this node has gone. O(depth)."""
        node = self.nodes.get(node_id)
        if node is None:
            return
        for above in node.upwards():
            above.visit = visit
            self._changed(above)

    def expect(self, key: Hashable, namespace: Hashable, packed: bytes) -> None:
        """An online request waits that begins with these tokens, until `no_longer_expect`. Nodes
        that it shares only in part do not count. O(depth + tokens compared).

        key: of the request
        """
        self.no_longer_expect(key)
        node, position, page = self._roots.get(namespace), 0, self._page_bytes
        while node is not None:
            child = node.children.get(packed[position : position + page])
            if child is None or not packed.startswith(child.segment, position):
                break
            node, position = child, position + len(child.segment)
            node.awaiting += 1
            self._changed(node)
        if node is not None and position:
            self._awaited[key] = node

    def no_longer_expect(self, key: Hashable) -> None:
        """It runs, or is gone. O(depth)."""
        node = self._awaited.pop(key, None)
        for above in () if node is None else node.upwards():
            above.awaiting -= 1
            assert above.awaiting >= 0, f"{above.node_id=}"
            self._changed(above)

    def knows(self, namespace: Hashable, page: bytes) -> bool:
        """Something begins with these tokens of the first page. O(1)."""
        root = self._roots.get(namespace)
        return root is not None and page in root.children

    def refer(self, namespace: Hashable, packed: bytes, by: int) -> None:
        """Requests that begin with these tokens wait now (`by` 1), or do no more (-1). O(depth +
        tokens compared)."""
        node = self._roots.get(namespace)
        position, page = 0, self._page_bytes
        while node is not None and position < len(packed):
            node = node.children.get(packed[position : position + page])
            if node is None:
                return
            shared = common_bytes(node.segment, packed, position)
            position += shared
            if shared == len(node.segment):
                node.passing += by
                assert node.passing >= 0, f"{node.node_id=} {node.passing=}"
            else:
                tokens = shared // page * page // TOKEN_BYTES
                left = node.stops.get(tokens, 0) + by
                assert left >= 0, f"{node.node_id=} {tokens=} {left=}"
                if left:
                    node.stops[tokens] = left
                else:
                    del node.stops[tokens]
            self._changed(node)
            if shared < len(node.segment):
                return

    def _count_future(self, node: KvNode, future: Iterable[Shared]) -> None:
        """future: prefixes getting longer, each with those that share it."""
        page = self._page_bytes // TOKEN_BYTES
        shared = list(future)
        longer = 0
        for entry in reversed(shared):
            count, tokens = entry.num_requests - longer, entry.prefix_len - node.start
            longer = entry.num_requests
            if tokens >= node.num_tokens:
                node.passing += count
            elif tokens >= page:
                tokens = tokens // page * page
                node.stops[tokens] = node.stops.get(tokens, 0) + count

    def evictable_from(self, node_id: int) -> int:
        """Tokens from a node on the device up to the root that are not locked. O(depth)."""
        node = self.nodes.get(node_id)
        num_tokens = 0
        while node is not None and node.parent is not None and not node.num_holds:
            num_tokens += node.num_tokens
            node = node.parent
        return num_tokens

    def gains_of_release(self, node_ids: Iterable[int]) -> list[int]:
        """Of each node, tokens that would not be locked without one lock of it. O(depth)."""
        nodes = self.nodes
        gains = []
        for node_id in node_ids:
            node = nodes.get(node_id)
            num_bytes = 0
            while node is not None and node.num_holds == 1:  # a root has no locks
                num_bytes += len(node.segment)
                node = node.parent
            gains.append(num_bytes // TOKEN_BYTES)
        return gains
