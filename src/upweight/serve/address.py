"""Where the server is."""

from upweight.config.sections.rollout import RolloutSection

EVERYWHERE = ("0.0.0.0", "::", "")  # listened on, but no place to go to


def server_urls(section: RolloutSection) -> list[str]:
    """The addresses of all servers that a training run talks to."""
    given = section.server_urls or ([section.server_url] if section.server_url is not None else [])
    if not given:
        return [local_url(section.server_host or "127.0.0.1", section.server_port or 8000)]
    plain = [one.rstrip("/").removesuffix("/v1") for one in given]
    return list(dict.fromkeys(one if "://" in one else f"http://{one}" for one in plain))


def local_url(host: str, port: int) -> str:
    """The address of a server that listens on `host`."""
    reached = "127.0.0.1" if host in EVERYWHERE else host
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
