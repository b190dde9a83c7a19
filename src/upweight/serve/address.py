"""Where the server is."""

from upweight.config.rollout import RolloutSection

EVERYWHERE = ("0.0.0.0", "::", "")  # listened on, but no place to go to


def server_url(section: RolloutSection) -> str:
    """The address that a training run talks to."""
    if section.server_url is not None:
        given = section.server_url.rstrip("/").removesuffix("/v1")
        return given if "://" in given else f"http://{given}"
    return local_url(section.server_host or "127.0.0.1", section.server_port or 8000)


def local_url(host: str, port: int) -> str:
    """The address of a server that listens on `host`."""
    reached = "127.0.0.1" if host in EVERYWHERE else host
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
