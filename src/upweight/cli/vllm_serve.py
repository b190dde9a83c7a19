"""`upweight vllm-serve`: the vLLM server that a config's training needs."""

import shlex
import sys
from pathlib import Path

from upweight.config import load_config
from upweight.config.servers import local_url
from upweight.log import warn_once
from upweight.serve.command import serve_command, warnings_of
from upweight.serve.process import installed_version, run_server


def run(path: Path, overrides: list[str], *, python: str | None, show: bool) -> int:
    """Start the server and stay until it ends; or print its command line."""
    config = load_config(path, overrides, fragment=True)
    for notice in config.notices:
        warn_once(notice)
    command = serve_command(config, python=python or sys.executable)
    if show:
        print(shlex.join([*(f"{name}={value}" for name, value in command.env.items()), *command.argv]))
        return 0
    for warning in warnings_of(config, installed_version(command.argv[0])):
        warn_once(warning)
    url = local_url(config.vllm.host, config.vllm.port)
    return run_server(command, url, lambda: print(f"vLLM is ready at {url}: {config.model.base_model}", flush=True))
