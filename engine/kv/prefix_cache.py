"""Finds full pages that already hold the KV of a prompt's beginning."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from kvbench_engine.kv.groups import first_page
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.sequence import Sequence as EngineSequence

_NO_KEY = (0, b"")
_NODE = (1 << 32) - 1  # the part of a name that is the node's number


class PrefixCache:
    """A tree of full pages of tokens: a node is found by its parent, the page before it, and its own tokens.

    A first node is found by the request's salt and its tokens. The whole prefix is compared by that, page by page, so
    no hit can serve another prompt's KV, and a prompt is looked at only as far as it is cached.

    A node has a physical page in each group of layers (``kv.groups``), those that are still cached. A page whose place
    is taken (two sequences computed the same prefix side by side) is not cached. A prefix needs all its pages in a
    group without a window: when one of them is evicted, the node and its descendants are dropped with all their pages,
    because they could not be found any more; a sequence that still runs offers its own pages again, from the first.
    In a group with a window a prefix needs only the pages that the token after it sees. Where every group has one, a
    node may have no page at all, as long as it has a descendant that has one.

    ``windows``: of each group. Pages of all groups stand side by side in lists, as in ``Sequence.pages``, with -1 for
    those that are not there.

    All facts about a node stand in lists by node, as numbers and bytes: an object a page, of which there may be
    a million, would make each full garbage collection stop the engine for seconds.
    """

    def __init__(self, page_size: int, num_pages: int, windows: Sequence[int | None] = (None,)):
        self.page_size = page_size
        self.evictions = 0  # pages
        self.seconds = 0.0  # of looking pages up and storing them
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._needs_all = [window is None for window in windows]  # of each group: a prefix needs all its pages
        self._has_empty = not any(self._needs_all)  # whether a node may have no page
        self._groups = len(windows)
        self._num_inserted = 0
        self._node_at: dict[tuple[int, bytes], int] = {}  # (name of the parent, or 0; tokens) -> node
        self._node_of = [-1] * num_pages  # by page; -1: not cached
        self._free: list[int] = []  # nodes that are not in use
        self._pages: list[list[int]] = [[] for _ in windows]  # of each group, by node; -1: none
        self._key_of: list[tuple[int, bytes]] = []
        self._name: list[int] = []  # insertion << 32 | node, unique for ever; 0: not in use
        self._child: list[int] = []  # a node whose parent it is; the others follow that one
        self._next: list[int] = []  # siblings: a list linked both ways
        self._prev: list[int] = []
        self._grow(num_pages)

    def match(self, seq: EngineSequence) -> list[int]:
        """Pages that hold the longest cached prefix of ``seq``, at most ``num_tokens - 1`` tokens of it.

        At least one token is always computed, for its logits. Neither counts nor shares the pages.
        """
        started = time.perf_counter()
        limit = (len(seq.token_ids) - 1) // self.page_size
        name, depth = self._verified(seq, limit)
        while depth < limit:
            node = self._node_at.get((name, self._packed(seq, depth)))
            if node is None:
                break
            name, depth = self._name[node], depth + 1
        path = self._path(name)
        if self._windows:
            depth = self._usable(path)
            del path[depth:]
            name = self._name[path[-1]] if path else 0
        seq.prefix_node, seq.prefix_depth = name, depth
        pages = self._pages_of(path)
        self.seconds += time.perf_counter() - started
        return pages

    def _path(self, name: int) -> list[int]:
        """The nodes from the first to the one with this name."""
        path = []
        while name:
            path.append(name & _NODE)
            name = self._key_of[path[-1]][0]
        path.reverse()
        return path

    def _usable(self, path: list[int]) -> int:
        """The longest part of ``path`` after which every window has all pages that it needs."""
        depth, size = len(path), self.page_size
        checked = [depth] * len(self._windows)  # pages from here to ``depth`` are there, of each window
        while depth:
            gap = depth
            for at, (group, window) in enumerate(self._windows):
                pages, first = self._pages[group], first_page(window, depth * size, size)
                index = min(checked[at], depth)
                while index > first and pages[path[index - 1]] >= 0:
                    index -= 1
                checked[at] = index
                if index > first:
                    gap = min(gap, index - 1)
            if gap == depth:
                break
            depth = gap
        return depth

    def _pages_of(self, path: list[int]) -> list[int]:
        """The pages of all groups along ``path``, without those that no window needs after it."""
        if self._groups == 1 and not self._windows:
            return [self._pages[0][node] for node in path]
        groups, firsts = self._groups, dict.fromkeys(range(self._groups), 0)
        for group, window in self._windows:
            firsts[group] = first_page(window, len(path) * self.page_size, self.page_size)
        pages = [-1] * (len(path) * groups)
        for group, first in firsts.items():
            of_group = self._pages[group]
            pages[first * groups + group :: groups] = [of_group[node] for node in path[first:]]
        return pages

    def _verified(self, seq: EngineSequence, limit: int) -> tuple[int, int]:
        """The last node of ``seq`` that was found before, if it still exists: its name, and nodes up to it."""
        name, node = seq.prefix_node, seq.prefix_node & _NODE
        if not name or seq.prefix_depth > limit or node >= len(self._name) or self._name[node] != name:
            return 0, 0
        return name, seq.prefix_depth

    def insert(self, seq: EngineSequence, num_full: int, pool: PagePool) -> None:
        """Cache the first ``num_full`` pages of ``seq``, all fully computed; continues where the last call ended."""
        started = time.perf_counter()
        assert num_full * self.page_size <= len(seq.token_ids) - seq.num_pending, "a page's tokens are not known"
        name, depth = self._verified(seq, num_full)
        at, own, node_of, all_pages, names = depth * self._groups, seq.pages, self._node_of, self._pages, self._name
        for index in range(depth, num_full):
            key = name, self._packed(seq, index)
            node = self._node_at.get(key)
            if node is None:
                node = self._add(key)
            for pages in all_pages:
                page = own[at]
                at += 1
                if page >= 0 > pages[node]:
                    assert node_of[page] < 0, f"page {page} is cached under another prefix"
                    pages[node] = page
                    node_of[page] = node
                    pool.mark_cached(page)
            name = names[node]
        seq.prefix_node, seq.prefix_depth = name, num_full
        if self._has_empty and name:
            self._prune(name & _NODE)
        self.seconds += time.perf_counter() - started

    def _add(self, key: tuple[int, bytes]) -> int:
        """A new node without pages."""
        if not self._free:
            self._grow(len(self._name))
        node = self._free.pop()
        self._num_inserted = number = self._num_inserted + (1 << 32)
        self._name[node] = number + node
        self._node_at[key] = node
        self._key_of[node] = key
        parent = key[0]
        if parent:
            parent &= _NODE
            sibling = self._next[node] = self._child[parent]
            if sibling >= 0:
                self._prev[sibling] = node
            self._child[parent] = node
        return node

    def _grow(self, count: int) -> None:
        """Make room for ``count`` more nodes; where a group keeps all pages, one a page is enough."""
        self._free += range(len(self._name) + count - 1, len(self._name) - 1, -1)
        for facts in (*self._pages, self._child, self._next, self._prev):
            facts += [-1] * count
        self._key_of += [_NO_KEY] * count
        self._name += [0] * count

    def evict(self, page: int) -> list[int]:
        """Drop a page that the pool allocates again; returns other cached pages that cannot be found without it."""
        node, group = self._node_of[page], 0
        while self._pages[group][node] != page:
            group += 1
        if self._needs_all[group]:
            pages = self._drop(node)
            self.evictions += len(pages)
            pages.remove(page)
            return pages
        self._pages[group][node] = self._node_of[page] = -1
        self.evictions += 1
        if self._has_empty:
            self._prune(node)
        return []

    def _prune(self, node: int) -> None:
        """Drop ``node`` if it has neither a page nor a child, then its parent likewise."""
        while self._child[node] < 0 and all(pages[node] < 0 for pages in self._pages):
            parent = self._key_of[node][0]
            self._drop(node)
            if not parent:
                break
            node = parent & _NODE

    def _drop(self, top: int) -> list[int]:
        """Drop a node and its descendants; returns the pages of all groups."""
        siblings, children = self._next, self._child
        before, after, parent = self._prev[top], siblings[top], self._key_of[top][0]
        if after >= 0:
            self._prev[after] = before
        if before >= 0:
            siblings[before] = after
        elif parent:
            children[parent & _NODE] = after
        nodes = [top]
        for node in nodes:  # grows as it goes: the whole subtree
            child = children[node]
            while child >= 0:
                nodes.append(child)
                child = siblings[child]
        return self._forget(nodes)

    def _forget(self, nodes: list[int]) -> list[int]:
        """Free ``nodes``; returns their pages."""
        dropped, node_at, key_of, name, all_pages = [], self._node_at, self._key_of, self._name, self._pages
        for node in nodes:
            del node_at[key_of[node]]
            key_of[node], name[node] = _NO_KEY, 0
            self._child[node] = self._next[node] = self._prev[node] = -1
            for pages in all_pages:
                page = pages[node]
                if page >= 0:
                    dropped.append(page)
                    pages[node] = self._node_of[page] = -1
        self._free += nodes
        return dropped

    def forget(self, seq: EngineSequence) -> list[int]:
        """Drop the first page of ``seq`` and its descendants, by any sequence; returns their pages."""
        first = self._node_at.get((0, self._packed(seq, 0)))
        pages = self._drop(first) if first is not None else []
        self.evictions += len(pages)
        return pages

    def clear(self, pool: PagePool) -> None:
        """Drop all pages."""
        for page in self._forget(list(self._node_at.values())):
            pool.drop_cached(page)

    def _packed(self, seq: EngineSequence, index: int) -> bytes:
        """The tokens of page ``index`` as bytes; the first page's also hold the salt."""
        start = index * self.page_size
        tokens = array("q", seq.token_ids[start : start + self.page_size]).tobytes()
        return tokens if index else _salt(seq) + tokens

    def check_integrity(self, pool: PagePool) -> None:
        """Assert that keys, nodes, pages, links and the pool's marks agree both ways. O(pages)."""
        nodes = {node for node, name in enumerate(self._name) if name}
        assert nodes.isdisjoint(self._free) and len(nodes) + len(self._free) == len(self._name)
        assert {node: self._key_of[node] for node in nodes} == {node: key for key, node in self._node_at.items()}
        placed = {pages[node]: node for pages in self._pages for node in nodes if pages[node] >= 0}
        assert placed == {page: node for page, node in enumerate(self._node_of) if node >= 0}
        marked = {page for page in range(pool.num_pages) if pool.is_cached(page)}
        assert set(placed) == marked, "the pool's marks differ"
        children: dict[int, set[int]] = {node: set() for node in nodes}
        for node in nodes:
            assert self._name[node] & _NODE == node
            if parent := self._key_of[node][0]:
                assert self._name[parent & _NODE] == parent, "a cached page cannot be reached"
                children[parent & _NODE].add(node)
        for node in nodes:
            own = [pages[node] >= 0 for pages in self._pages]
            kept = all(there >= needed for there, needed in zip(own, self._needs_all, strict=True))
            assert kept and (any(own) or children[node]), "a node has lost pages that it needs"
            child, before, linked = self._child[node], -1, set()
            while child >= 0:
                assert self._prev[child] == before and child not in linked
                linked.add(child)
                before, child = child, self._next[child]
            assert linked == children[node], "the links of children differ from their parents"


def _salt(seq: EngineSequence) -> bytes:
    salt = seq.request.cache_salt
    return b"" if salt is None else salt.encode(errors="surrogatepass")  # any string, even half of a surrogate pair
