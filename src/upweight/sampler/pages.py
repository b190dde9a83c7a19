"""Pages of keys and values: which are free, which tokens the others hold, and which prefixes can be shared.

A page holds the keys and values of `PAGE` tokens in all layers. Pages whose tokens are known form a tree: a path from
the root spells a prefix, whose pages any number of sequences may read. A page that no sequence reads stays until its
room is needed, so that a later turn of a conversation finds what an earlier one computed.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

PAGE = 64


@dataclass(eq=False)
class CachedPage:
    """A page with known tokens, after the pages of its parents; fewer than `PAGE` tokens only without children."""

    page: int
    ids: tuple[int, ...]
    parent: Optional["CachedPage"]
    children: dict[tuple[int, ...], "CachedPage"] = field(default_factory=dict)
    readers: int = 0

    def path(self) -> list["CachedPage"]:
        """Return the pages from the first to this one."""
        nodes: list[CachedPage] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PageCache:
    """All pages of a sampler; page 0 is never handed out: slots without a sequence write into it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.clear()

    def grow(self, pages: int) -> None:
        """Have more pages in all; those that there were keep their tokens."""
        self._free.extend(range(max(self.pages, 1), pages))
        self.pages = pages

    def clear(self) -> None:
        """Forget all tokens: after a change of the weights no page is valid."""
        self._free = deque(range(1, self.pages))
        self._root = CachedPage(0, (), None)
        self._unread: OrderedDict[CachedPage, None] = OrderedDict()  # without readers and children, the oldest first

    @property
    def available(self) -> int:
        """Return how many pages are free, or hold only what nobody reads and may be dropped at once."""
        return len(self._free) + len(self._unread)

    def allocate(self, count: int) -> list[int] | None:
        """Return free pages, for which unread ones are dropped; None if there are not as many."""
        while len(self._free) < count and self._unread:
            node, _ = self._unread.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.ids]
            self._free.append(node.page)
            self._note(node.parent)
        if len(self._free) < count:
            return None
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages that are not in the tree."""
        self._free.extend(pages)

    def match(self, ids: Sequence[int]) -> tuple[CachedPage, CachedPage | None, int]:
        """Return the last whole page of the longest cached prefix, a page with its further tokens, and their number."""
        node, at = self._root, 0
        while (child := node.children.get(tuple(ids[at : at + PAGE]))) is not None and len(child.ids) == PAGE:
            node, at = child, at + PAGE
        rest = tuple(ids[at : at + PAGE])
        common, best = max(((_common(rest, child.ids), child) for child in node.children.values()),
                           key=lambda pair: pair[0], default=(0, None))  # fmt: skip
        return node, best if common else None, common

    def insert(self, node: CachedPage, ids: Sequence[int], pages: Sequence[int]) -> CachedPage:
        """Put pages that hold `ids`, the tokens after `node`, into the tree; return the last. Known ones are freed."""
        for at, page in zip(range(0, len(ids), PAGE), pages, strict=True):
            tokens = tuple(ids[at : at + PAGE])
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = CachedPage(page, tokens, node)
                self._unread.pop(node, None)
            else:
                self._free.append(page)
            self._note(child)
            node = child
        return node

    def read(self, node: CachedPage) -> None:
        """Count one more reader of a path, whose pages stay until it is released."""
        node.readers += 1
        self._unread.pop(node, None)

    def release(self, node: CachedPage) -> None:
        """Count one reader of a path less."""
        node.readers -= 1
        self._note(node)

    def _note(self, node: CachedPage) -> None:
        """Move a page to the end of the unread ones if it is one."""
        if node is not self._root and not node.readers and not node.children:
            self._unread[node] = None
            self._unread.move_to_end(node)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of equal leading tokens."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
