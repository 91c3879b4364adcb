"""The page pool: states, sharing, eviction order, digests."""

import pytest

from deepseek_worker.blocks import PagePool, page_digest, root_digest


def digests(*names: str) -> list[bytes]:
    return [page_digest(root_digest(""), [ord(c) for c in name]) for name in names]


def test_allocates_every_page_once():
    pool = PagePool(4)

    pages = pool.allocate(4)

    assert sorted(pages) == [0, 1, 2, 3]
    assert pool.num_available == 0
    pool.check([pages])


def test_released_pages_without_digest_are_blank_again():
    pool = PagePool(2)
    pages = pool.allocate(2)

    pool.release(pages)

    assert (pool.num_blank, pool.num_cached, pool.num_held) == (2, 0, 0)


def test_a_registered_page_is_found_after_its_release_and_shared():
    pool = PagePool(3)
    first, second = digests("a", "b")
    pages = pool.allocate(2)
    pool.register(pages[0], first)
    pool.register(pages[1], second)
    pool.release(pages)

    found = pool.match([first, second])
    pool.hold(found)
    pool.hold(found)

    assert found == pages
    assert pool.num_held == 2
    pool.check([found, found])


def test_a_match_ends_at_the_first_unknown_page():
    pool = PagePool(3)
    first, second, third = digests("a", "b", "c")
    pages = pool.allocate(2)
    pool.register(pages[0], first)
    pool.register(pages[1], third)

    assert pool.match([first, second, third]) == [pages[0]]


def test_blank_pages_go_before_cached_ones_and_the_longest_unused_first():
    pool = PagePool(3)
    old, new = digests("old", "new")
    (old_page,) = pool.allocate(1)
    (new_page,) = pool.allocate(1)
    pool.register(old_page, old)
    pool.register(new_page, new)
    pool.release([old_page])
    pool.release([new_page])

    taken = pool.allocate(2)

    assert old_page in taken
    assert pool.match([old]) == []
    assert pool.match([new]) == [new_page]


def test_the_end_of_a_prefix_is_reused_before_its_start():
    pool = PagePool(2)
    start, end = digests("start", "end")
    pages = pool.allocate(2)
    pool.register(pages[0], start)
    pool.register(pages[1], end)
    pool.release(pages)

    pool.allocate(1)

    assert pool.match([start]) == [pages[0]]


def test_equal_content_keeps_its_first_page():
    pool = PagePool(2)
    (digest,) = digests("same")
    first, second = pool.allocate(2)
    pool.register(first, digest)

    pool.register(second, digest)
    pool.release([first, second])

    assert pool.match([digest]) == [first]
    assert (pool.num_blank, pool.num_cached) == (1, 1)
    pool.check([])


def test_forgotten_pages_are_never_found_and_end_up_blank():
    pool = PagePool(2)
    first, second = digests("a", "b")
    pages = pool.allocate(2)
    pool.register(pages[0], first)
    pool.register(pages[1], second)
    pool.hold([pages[0]])
    pool.release(pages)

    pool.forget([first, second])

    assert pool.match([first]) == []
    assert (pool.num_blank, pool.num_held) == (1, 1)
    pool.check([[pages[0]]])
    pool.release([pages[0]])
    pool.check([])


def test_digests_are_long_and_depend_on_salt_parent_and_every_token():
    base = page_digest(root_digest("tenant-a"), [1, 2, 3])

    assert len(base) >= 16
    assert base != page_digest(root_digest("tenant-b"), [1, 2, 3])
    assert base != page_digest(root_digest("tenant-a", "adapter"), [1, 2, 3])
    assert root_digest("b", "a") != root_digest("a", "b")
    assert root_digest("b", "a") != root_digest("a\0b")
    assert base != page_digest(base, [1, 2, 3])
    assert base != page_digest(root_digest("tenant-a"), [1, 2, 4])


def test_check_finds_a_lost_page():
    pool = PagePool(2)
    pool.allocate(1)

    with pytest.raises(AssertionError):
        pool.check([])
