from urllib.parse import urlsplit

import pytest

from upweight.data.raw_row import RowError
from upweight.data.sources.image_urls import allows, download_image


@pytest.mark.parametrize(
    ("host", "url", "allowed"),
    [
        ("a.org", "https://a.org/x.png", True),
        ("A.org", "https://a.ORG/x.png", True),
        ("a.org", "https://b.a.org/x.png", False),
        ("a.org", "https://aa.org/x.png", False),
        ("a.org", "https://a.org@b.org/x.png", False),
        ("*.a.org", "https://b.a.org/x.png", True),
        ("*.a.org", "https://ba.org/x.png", False),
        ("*.a.org", "https://a.org/x.png", False),
        ("a.org:8000", "http://a.org:8000/x.png", True),
        ("a.org:8000", "http://a.org/x.png", False),
        ("a.org:443", "https://a.org/x.png", True),
    ],
)
def test_entries_allow_their_hosts(host, url, allowed):
    assert allows(host, urlsplit(url)) == allowed


def test_a_host_that_does_not_answer_is_named():
    with pytest.raises(RowError, match=r"http://127.0.0.1:9/a.png does not answer"):
        download_image("http://127.0.0.1:9/a.png", ["127.0.0.1"], "images[0]")
