"""Which full pages already hold the KV of a prompt's beginning."""

from __future__ import annotations

import time
from array import array
from hashlib import blake2b

from engine.page_pool import PagePool
from engine.sequence import Sequence

_KEY_BYTES = 16


class _Node:
    """One prefix whose last page is, or was, in the cache. ``page`` -1: evicted, kept because a child's is not."""

    __slots__ = ("children", "key", "page", "parent", "tokens")

    def __init__(self, key: bytes, tokens: bytes, parent: _Node | None):
        self.key, self.tokens, self.parent = key, tokens, parent
        self.page = -1
        self.children = 0


class PrefixCache:
    """Chained hash of full pages -> page.

    A page's key is blake2b-128 over its parent's key and its own tokens; the first page's has the request's
    salt instead. Each page of a sequence is hashed once (``Sequence.page_hashes``).

    A key only finds; what is served is verified. A hit compares the page's tokens and that its parent is the very node
    that was verified just before, so by induction the whole prefix is the same, and a collision of keys costs a hit
    and never serves another prompt's KV. For this a node outlives its page as long as a child's page is cached.

    A page whose key is already taken (two sequences computed the same prefix side by side) stays out of the cache:
    two owners of one key would orphan the first.
    Invariant: ``_node_of[p].page == p`` for every cached page, the pool marks exactly these pages, and each node has
    a page or children.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._nodes: dict[bytes, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        self.hits = 0  # tokens
        self.queries = 0  # tokens
        self.evictions = 0  # pages
        self.hash_seconds = 0.0

    def match(self, seq: Sequence) -> list[int]:
        """Pages that hold the longest cached prefix of ``seq``, at most ``num_tokens - 1`` tokens of it.

        One token at least is always computed: its logits are what the step is for. Counts nothing and takes nothing.
        """
        matched: list[int] = []
        parent = None
        limit = (len(seq.token_ids) - 1) // self.page_size
        if self._node_of:
            self._hash_pages(seq, limit)
            nodes = self._nodes
            for index, key in enumerate(seq.page_hashes[:limit]):
                node = nodes.get(key)
                if node is None or node.page < 0 or not self._verified(node, parent, seq, index):
                    break
                matched.append(node.page)
                parent = node
        seq.prefix_node, seq.prefix_depth = parent, len(matched)
        return matched

    def insert(self, seq: Sequence, num_full: int, pool: PagePool) -> None:
        """Offer the first ``num_full`` pages of ``seq``, all fully computed, from where it was left the last time."""
        self._hash_pages(seq, num_full)
        parent, depth = seq.prefix_node, seq.prefix_depth
        if parent is not None and self._nodes.get(parent.key) is not parent:
            parent, depth = None, 0  # forgotten meanwhile (another sequence's page carried it): once more from the root
        for index in range(depth, num_full):
            page, key = seq.pages[index], seq.page_hashes[index]
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(key, self._packed(seq, index), parent)
                if parent is not None:
                    parent.children += 1
            elif not self._verified(node, parent, seq, index):
                return  # a collision: whoever came first keeps the key
            if node.page < 0:
                assert page not in self._node_of, f"page {page} is cached under another prefix"
                node.page = page
                self._node_of[page] = node
                pool.mark_cached(page)
            parent = node
            seq.prefix_node, seq.prefix_depth = node, index + 1

    def _verified(self, node: _Node, parent: _Node | None, seq: Sequence, index: int) -> bool:
        return node.parent is parent and node.tokens == self._packed(seq, index)

    def evict(self, page: int) -> None:
        """Forget a page that the pool gives away."""
        self.evictions += 1
        self._forget(page)

    def clear(self, pool: PagePool) -> None:
        """Forget everything."""
        for page in list(self._node_of):
            self._forget(page)
            pool.drop_cached(page)

    def _forget(self, page: int) -> None:
        node = self._node_of.pop(page)
        node.page = -1
        self._prune(node)

    def _prune(self, node: _Node | None) -> None:
        while node is not None and node.page < 0 and not node.children:
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.children -= 1

    def _packed(self, seq: Sequence, index: int) -> bytes:
        """What makes page ``index`` this one, given its parent: its tokens; the first also has the salt."""
        start = index * self.page_size
        tokens = array("q", seq.token_ids[start : start + self.page_size]).tobytes()
        return tokens if index else _salt(seq) + tokens

    def _hash_pages(self, seq: Sequence, count: int) -> None:
        """Keys of the first ``count`` pages, those that are not there yet."""
        keys, size = seq.page_hashes, self.page_size
        first = len(keys)
        if first >= count:
            return
        started = time.perf_counter()
        parent = keys[-1] if keys else _salt(seq)
        packed = memoryview(array("q", seq.token_ids[first * size : count * size]).tobytes())  # once, not page by page
        stride = 8 * size
        for at in range(0, len(packed), stride):
            digest = blake2b(parent, digest_size=_KEY_BYTES)
            digest.update(packed[at : at + stride])
            parent = digest.digest()
            keys.append(parent)
        self.hash_seconds += time.perf_counter() - started

    def check_integrity(self, pool: PagePool) -> None:
        """Assert that nodes, pages and the pool's marks agree both ways. O(pages)."""
        with_page = {node.page: node for node in self._nodes.values() if node.page >= 0}
        assert with_page == self._node_of, "hash map and page hashes disagree"
        assert all(self._nodes[key].key == key for key in self._nodes)
        children: dict[int, int] = {}
        for node in self._nodes.values():
            assert node.page >= 0 or node.children, "a node has neither a page nor children"
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a node's parent is gone"
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        assert all(node.children == children.get(id(node), 0) for node in self._nodes.values())
        marked = {p for p in range(pool.num_pages) if pool.is_cached(p)}
        assert marked == set(self._node_of), "the pool and the prefix cache disagree about what is cached"


def _salt(seq: Sequence) -> bytes:
    salt = seq.request.cache_salt
    return b"" if salt is None else salt.encode(errors="surrogatepass")  # any text will do, half a character too
