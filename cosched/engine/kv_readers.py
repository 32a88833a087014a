"""Waiting requests that will read KV in the tree: what eviction knows of the future.

Keys are SGLang's (`RadixKey`): token ids with the namespace of a request, and with EAGLE pairs of
neighbouring tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from cosched.memory.node import KvNode
from cosched.pool.radix import Shared


class KvReaders:
    """Keeps `KvNode.awaiting`, `passing` and `stops` of each node.

    future  the waiting offline requests that share a prefix (`PrefixPool.future_references`), from
            its token ids and namespace; asked for new nodes only, and only where some wait for what
            is above them
    """

    def __init__(
        self,
        page_size: int,
        future: Callable[[array[int], Hashable], Sequence[Shared]],
        changed: Callable[[KvNode], None],
    ) -> None:
        self._page_size = page_size
        self._future = future
        self._changed = changed
        self._awaited: dict[Hashable, KvNode] = {}
        """Of waiting online requests, the last node that each will use."""

    def expect(self, request: Hashable, root: Any, key: Any) -> None:
        """An online request waits that begins with these tokens, until `no_longer_expect`. Nodes
        that it shares only in part do not count. O(depth + tokens compared)."""
        self.no_longer_expect(request)
        last = None
        for node, num_shared in walk(root, key, self._page_size):
            if num_shared < node.num_tokens:
                break
            node.awaiting += 1
            self._changed(node)
            last = node
        if last is not None:
            self._awaited[request] = last

    def no_longer_expect(self, request: Hashable) -> None:
        """It runs, or is gone. O(depth)."""
        node = self._awaited.pop(request, None)
        for above in () if node is None else node.upwards():
            above.awaiting -= 1
            assert above.awaiting >= 0, f"{above.node_id=}"
            self._changed(above)

    def refer(self, root: Any, key: Any, by: int) -> None:
        """An offline request that begins with these tokens waits now (`by` 1), or does no more
        (-1). O(depth + tokens compared)."""
        for node, num_shared in walk(root, key, self._page_size):
            node.refer(num_shared, by)
            self._changed(node)

    def added(self, node: Any) -> None:
        """A node is new in the tree."""
        parent = node.parent
        if parent.parent is None or parent.passing:
            key = node.key
            found = self._future(_tokens_to(node), (key.extra_key, key.cache_salt))
            if key.is_bigram:
                found = [Shared(s.prefix_len - 1, s.num_requests) for s in found]
            node.refer_all(found, page_size=self._page_size)

    def removed(self, node: KvNode) -> None:
        """A node is in the tree no longer."""
        if node.awaiting:
            assert node.parent is not None
            for request in [request for request, end in self._awaited.items() if end is node]:
                self._awaited[request] = node.parent

    def reset(self) -> None:
        """The tree is empty."""
        self._awaited.clear()


def walk(node: Any, key: Any, page_size: int, *, position: int = 0) -> Iterator[tuple[Any, int]]:
    """The nodes below one that a key shares whole pages with, from its tokens at `position` on,
    each with the number of its tokens that are shared: all, but of the last one."""
    end = len(key)
    while end - position >= page_size:
        node = node.children.get(key.child_key_at(position, page_size))
        if node is None:
            return
        num_shared = node.key.match_at(key, position, page_size)
        yield node, num_shared
        if num_shared < node.num_tokens:
            return
        position += num_shared


def _tokens_to(node: Any) -> array[int]:
    """Token ids from the root to the end of a node. Neighbouring keys of pairs have a token in
    common."""
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    first = keys.pop()
    tokens = array("q", first.raw_token_ids())
    for key in reversed(keys):
        ids = key.raw_token_ids()
        tokens += ids[1:] if key.is_bigram else ids
    return tokens
