"""Pages: shared while they are read, kept while there is room, dropped from their ends, never handed out twice."""

from upweight.sampler.pages import PAGE, PageCache

LONG = list(range(3 * PAGE + 5))


def test_a_prefix_is_cached_by_whole_pages_and_a_tail():
    cache = PageCache(10)
    root, source, common = cache.match(LONG)
    assert (source, common) == (None, 0)
    pages = cache.allocate(4)
    assert pages is not None
    last = cache.insert(root, LONG, pages)
    assert [node.page for node in last.path()] == pages
    assert len(last.ids) == 5
    node, source, common = cache.match([*LONG, 7, 8])
    assert (node, source, common) == (last.parent, last, 5)
    node, source, common = cache.match([*LONG[: PAGE + 9], 999])
    assert [one.page for one in node.path()] == pages[:1]
    assert source is not None
    assert (source.page, common) == (pages[1], 9)


def test_pages_are_dropped_oldest_first_from_the_end_of_their_prefix_and_not_while_they_are_read():
    cache = PageCache(7)  # page 0 is not handed out
    root = cache.match([])[0]
    old = cache.insert(root, LONG[: 2 * PAGE], cache.allocate(2) or [])
    new = cache.insert(root, [5, *LONG[:PAGE]], cache.allocate(2) or [])
    cache.read(new)
    assert cache.allocate(5) is None, "two pages are read"
    taken = cache.allocate(3)
    assert taken is not None
    assert not set(taken) & {node.page for node in new.path()}
    assert cache.match(LONG)[0] in (root, old.parent), "its last page went first"
    cache.release(new)
    rest = cache.allocate(3)
    assert rest is not None
    assert sorted([*taken, *rest]) == [1, 2, 3, 4, 5, 6]
    assert cache.match([5])[2] == 0


def test_a_page_with_known_tokens_is_free_again():
    cache = PageCache(5)
    root = cache.match([])[0]
    first = cache.insert(root, LONG[:PAGE], cache.allocate(1) or [])
    again = cache.insert(root, LONG[:PAGE], cache.allocate(1) or [])
    assert again is first
    assert cache.available == 4
