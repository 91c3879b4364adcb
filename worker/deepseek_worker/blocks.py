"""The page pool: who holds which KV page, and which pages still carry a known prefix.

The scheduler asks (`match`, `num_available`) and then tells (`hold`, `allocate`, `register`,
`release`). A page is always in exactly one state:

- blank: nobody holds it and its content means nothing,
- cached: nobody holds it, and its digest says whose KV it carries; reused oldest first,
- held: by one sequence or, when it is a shared prefix, by several.

Digests are SHA-256, chained from page to page and salted by the request and its LoRA adapter, so
neither a collision nor a guess lets one tenant read another's KV. No torch here: this file knows
page numbers only.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_digest(salt: str, adapter: str | None = None) -> bytes:
    """The digest that the first page of every sequence with this salt and adapter is chained to."""
    # No name of an adapter is empty or holds a zero byte, so the salt cannot feign one.
    text = b"deepseek-worker prefix\0" + (adapter or "").encode() + b"\0" + salt.encode()
    return hashlib.sha256(text).digest()


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of one full page, given the digest of everything before it."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PagePool:
    """Reference counts and digests of `num_pages` pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._digest_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}

    @property
    def num_blank(self) -> int:
        """Pages without content."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that a later prompt may find."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now."""
        return len(self._blank) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold; a shared page counts once."""
        return self.num_pages - self.num_available

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_cached_of(self, pages: Iterable[int]) -> int:
        """How many of these pages `hold` would take out of the available ones."""
        return sum(page in self._cached for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Share pages that `match` found."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages for new content: blank ones first, then the longest unused cached ones."""
        assert num_pages <= self.num_available, "ask num_available before allocate"  # noqa: S101
        pages = []
        for _ in range(num_pages):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def register(self, page: int, digest: bytes) -> None:
        """Make a full, computed page findable; the first page of equal content stays it."""
        if digest not in self._page_of and self._digest_of[page] is None:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Give up one sequence's hold; the end of its prefix is reused before the start."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._digest_of[page] is None:
                    self._blank.append(page)
                else:
                    self._cached[page] = None

    def forget(self, digests: Iterable[bytes]) -> None:
        """Let nobody find these prefixes any more, because their pages' content is wrong."""
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                continue
            self._forget(page)
            if self._references[page] == 0:
                del self._cached[page]
                self._blank.append(page)

    def check(self, held_by_sequences: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is in exactly one state."""
        expected = [0] * self.num_pages
        for pages in held_by_sequences:
            assert len(set(pages)) == len(pages), f"one sequence holds a page twice: {pages}"  # noqa: S101
            for page in pages:
                expected[page] += 1
        assert expected == self._references, "references differ from what sequences hold"  # noqa: S101
        states = sorted(
            [*self._blank, *self._cached, *(p for p, count in enumerate(expected) if count)]
        )
        assert states == list(range(self.num_pages)), "a page is lost or in two states"  # noqa: S101
        assert all(self._digest_of[page] is None for page in self._blank)  # noqa: S101
        assert all(self._digest_of[page] is not None for page in self._cached)  # noqa: S101
        for digest, page in self._page_of.items():
            assert self._digest_of[page] == digest, f"page {page} is found by a wrong digest"  # noqa: S101
        assert len(self._page_of) == sum(d is not None for d in self._digest_of)  # noqa: S101

    def _forget(self, page: int) -> None:
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
            self._digest_of[page] = None
