"""Where a training run looks for its server."""

import pytest

from upweight.config.sections.rollout import RolloutSection
from upweight.config.servers import server_urls


@pytest.mark.parametrize(
    ("keys", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"server_host": "0.0.0.0", "server_port": 8001}, "http://127.0.0.1:8001"),
        ({"server_host": "gpu3"}, "http://gpu3:8000"),
        ({"server_host": "::1"}, "http://[::1]:8000"),
        ({"server_url": "https://box:1/v1/", "server_port": 9}, "https://box:1"),
        ({"server_url": "box:1"}, "http://box:1"),
    ],
)
def test_addresses(keys, url):
    assert server_urls(RolloutSection(**keys)) == [url]
