"""Images that rows name by address: downloaded from hosts that the config allows."""

import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from upweight.data.raw_row import RowError

LARGEST = 64 << 20
REDIRECTS = 5
TRIES = 3
WAIT = httpx.Timeout(30, connect=10)


class _Retry(Exception):
    """The host may answer when it is asked again."""


def download_image(url: str, hosts: Sequence[str], key: str) -> bytes:
    """Return what an address has, of one of the hosts that `image_hosts` names; errors name the row's key."""
    for attempt in range(TRIES):
        try:
            return _fetch(url, hosts, key)
        except (httpx.TransportError, _Retry) as error:
            if attempt + 1 == TRIES:
                why = str(error) or type(error).__name__
                raise RowError(key, f"an image; {url[:200]} does not answer: {why}") from error
            time.sleep(0.5 * 2**attempt)
    raise AssertionError


def allows(host: str, place: SplitResult) -> bool:
    """Return whether an entry of `image_hosts` (a name, name:port or *.name) allows an address."""
    name = (place.hostname or "").lower()
    wanted = host.lower()
    if wanted.startswith("*."):
        return name.endswith(wanted[1:])
    port = place.port or {"http": 80, "https": 443}[place.scheme]
    return wanted in (name, f"{name}:{port}")


def _check_host(place: SplitResult, hosts: Sequence[str], key: str) -> None:
    if not any(allows(host, place) for host in hosts):
        remedy = f"save it, or allow its host: `image_hosts: [{place.hostname}]`"
        raise RowError(key, f"an image file, bytes or base64; nothing is downloaded from {place.hostname}: {remedy}")


def _fetch(url: str, hosts: Sequence[str], key: str) -> bytes:
    """Return what an address has. Redirects are followed to allowed hosts only."""
    for _ in range(1 + REDIRECTS):
        _check_host(urlsplit(url), hosts, key)
        with httpx.stream("GET", url, timeout=WAIT, follow_redirects=False) as answer:
            if answer.has_redirect_location:
                url = urljoin(url, answer.headers["location"])
                if urlsplit(url).scheme not in ("http", "https"):
                    raise RowError(key, f"an image; its address leads to {url[:80]}")
                continue
            if answer.status_code >= 500 or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                raise _Retry(f"status {answer.status_code}")
            if answer.status_code != httpx.codes.OK:
                raise RowError(key, f"an image; {url[:200]} answers with status {answer.status_code}")
            return _body(answer, url, key)
    raise RowError(key, f"an image; {url[:200]} redirects more than {REDIRECTS} times")


def _body(answer: httpx.Response, url: str, key: str) -> bytes:
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) > LARGEST:
            raise RowError(key, f"an image of at most {LARGEST >> 20} MB; {url[:200]} has more")
    return bytes(content)
