"""Finds full pages that already hold the KV of a prompt's beginning."""

from __future__ import annotations

import time
from array import array
from hashlib import blake2b

from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.sequence import Sequence

_KEY_BYTES = 16


class _Node:
    """A cached page; its parent is the page before it, which is cached too."""

    __slots__ = ("children", "key", "page", "parent", "tokens")

    def __init__(self, key: bytes, tokens: bytes, parent: _Node | None, page: int):
        self.key, self.tokens, self.parent, self.page = key, tokens, parent, page
        self.children: dict[_Node, None] = {}  # a dict for its order: the same in every run


class PrefixCache:
    """Chained hash of full pages -> page.

    A page's key is blake2b-128 over its parent's key and its own tokens; the first page's has the request's
    salt instead. Each page of a sequence is hashed once (``Sequence.page_hashes``).

    A hit is verified: the page's tokens are compared, and its parent must be the node verified before it. By induction
    the whole prefix is the same. A collision of keys costs a hit and never serves another prompt's KV.

    A page whose key is taken (two sequences computed the same prefix side by side) is not cached; its later pages
    become children of the other sequence's page. When a page is evicted, its descendants are evicted with it, because
    they could not be found any more; a sequence that still runs offers its own pages again, from the first.
    Invariant: ``_node_of[p].page == p`` for every cached page, the pool marks exactly these pages, and the parent of
    every node is a node.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._nodes: dict[bytes, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        self.evictions = 0  # pages
        self.hash_seconds = 0.0

    def match(self, seq: Sequence) -> list[int]:
        """Pages that hold the longest cached prefix of ``seq``, at most ``num_tokens - 1`` tokens of it.

        At least one token is always computed, for its logits. Neither counts nor shares the pages.
        """
        limit = (len(seq.token_ids) - 1) // self.page_size
        if not self._nodes or not limit:
            seq.prefix_node, seq.prefix_depth = None, 0
            return []
        self._hash_pages(seq, limit)
        parent, depth = self._known(seq, limit)
        for index in range(depth, limit):
            node = self._nodes.get(seq.page_hashes[index])
            if node is None or not self._verified(node, parent, seq, index):
                break
            parent, depth = node, index + 1
        seq.prefix_node, seq.prefix_depth = parent, depth
        return _pages_to(parent)

    def _known(self, seq: Sequence, limit: int) -> tuple[_Node | None, int]:
        """The last verified page of ``seq``, if it is still cached, so that a waiting prompt is not compared again."""
        node = seq.prefix_node
        if node is None or seq.prefix_depth > limit or self._nodes.get(node.key) is not node:
            return None, 0
        return node, seq.prefix_depth

    def insert(self, seq: Sequence, num_full: int, pool: PagePool) -> None:
        """Cache the first ``num_full`` pages of ``seq``, all fully computed; continues where the last call ended."""
        self._hash_pages(seq, num_full)
        parent, depth = self._known(seq, num_full)
        for index in range(depth, num_full):
            page, key = seq.pages[index], seq.page_hashes[index]
            node = self._nodes.get(key)
            if node is None:
                assert page not in self._node_of, f"page {page} is cached under another prefix"
                node = self._nodes[key] = self._node_of[page] = _Node(key, self._packed(seq, index), parent, page)
                if parent is not None:
                    parent.children[node] = None
                pool.mark_cached(page)
            elif not self._verified(node, parent, seq, index):
                return  # a collision: the first one keeps the key
            parent = node
            seq.prefix_node, seq.prefix_depth = node, index + 1

    def _verified(self, node: _Node, parent: _Node | None, seq: Sequence, index: int) -> bool:
        return node.parent is parent and node.tokens == self._packed(seq, index)

    def evict(self, page: int) -> list[int]:
        """Drop a page that the pool allocates again, and its descendants; returns the descendants' pages."""
        top = self._node_of[page]
        if top.parent is not None:
            del top.parent.children[top]
        nodes = [top]
        for node in nodes:  # grows as it goes: the whole subtree
            nodes.extend(node.children)
            del self._nodes[node.key], self._node_of[node.page]
        self.evictions += len(nodes)
        return [node.page for node in nodes[1:]]

    def forget(self, seq: Sequence) -> list[int]:
        """Drop the first page of ``seq`` and its descendants, by any sequence; returns their pages."""
        first = self._nodes.get(seq.page_hashes[0]) if seq.page_hashes else None
        return [first.page, *self.evict(first.page)] if first is not None else []

    def clear(self, pool: PagePool) -> None:
        """Drop all pages."""
        for page in self._node_of:
            pool.drop_cached(page)
        self._nodes.clear()
        self._node_of.clear()

    def _packed(self, seq: Sequence, index: int) -> bytes:
        """The tokens of page ``index`` as bytes; the first page's also hold the salt."""
        start = index * self.page_size
        tokens = array("q", seq.token_ids[start : start + self.page_size]).tobytes()
        return tokens if index else _salt(seq) + tokens

    def _hash_pages(self, seq: Sequence, count: int) -> None:
        """Make the missing keys of the first ``count`` pages."""
        keys, size = seq.page_hashes, self.page_size
        first = len(keys)
        if first >= count:
            return
        assert count * size <= seq.num_known, "a page whose tokens are not known has no key"
        started = time.perf_counter()
        parent = keys[-1] if keys else _salt(seq)
        packed = memoryview(array("q", seq.token_ids[first * size : count * size]).tobytes())
        stride = 8 * size
        for at in range(0, len(packed), stride):
            digest = blake2b(parent, digest_size=_KEY_BYTES)
            digest.update(packed[at : at + stride])
            parent = digest.digest()
            keys.append(parent)
        self.hash_seconds += time.perf_counter() - started

    def check_integrity(self, pool: PagePool) -> None:
        """Assert that nodes, pages and the pool's marks agree both ways. O(pages)."""
        assert {node.page: node for node in self._nodes.values()} == self._node_of, "hash map and pages disagree"
        for key, node in self._nodes.items():
            assert node.key == key
            assert all(self._nodes.get(child.key) is child and child.parent is node for child in node.children)
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a cached page cannot be reached"
                assert node in node.parent.children
        marked = {p for p in range(pool.num_pages) if pool.is_cached(p)}
        assert marked == set(self._node_of), "the pool and the prefix cache disagree about what is cached"


def _pages_to(node: _Node | None) -> list[int]:
    pages = []
    while node is not None:
        pages.append(node.page)
        node = node.parent
    pages.reverse()
    return pages


def _salt(seq: Sequence) -> bytes:
    salt = seq.request.cache_salt
    return b"" if salt is None else salt.encode(errors="surrogatepass")  # any string, even half of a surrogate pair
