"""`upweight serve`: an OpenAI-compatible endpoint for a trained model, in this process or by vLLM."""

import contextlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upweight.cli.inputs import TrainedModel, find_trained, text_format_of, trained_on
from upweight.errors import UserError
from upweight.export.targets import name_of
from upweight.log import logger, quiet_transformers

BASE = "base"  # the name of the model before training


def run_in_process(
    target: str,
    overrides: list[str],
    *,
    port: int | None,
    base: bool,
    defaults: Mapping[str, Any],
    open_it: bool,
    asked: Mapping[str, Any],
) -> None:
    """Load a trained model, and its base beside it, and serve them until Ctrl-C."""
    if asked["backend"] != "transformers":
        raise UserError(f"--backend: there is no {asked['backend']!r}. There are transformers and vllm.")
    if asked["python"] or asked["show"]:
        raise UserError("--python and --show go with --backend vllm")
    from upweight.cli.report import open_page
    from upweight.inference.endpoint.server import HERE, open_endpoint

    quiet_transformers()
    with open_endpoint(_load(find_trained(target, overrides), base), defaults, port) as server:
        address = f"http://{HERE}:{server.server_address[1]}"
        print(f"{address}/v1  (models: {', '.join(server.models)}; chat page: {address}/; Ctrl-C ends it)", flush=True)
        if open_it:
            open_page(f"{address}/")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _load(trained: TrainedModel, base: bool) -> dict[str, Any]:
    """Return the generator of the trained model by its name, and that of the model it was trained from."""
    from upweight.inference.generate import load_text_generator

    data, entry, _ = text_format_of(trained)
    kept = {"data": data, "entry": entry, "folder": trained.config.folder, "trained_on": trained_on(trained)}
    name = name_of(trained.adapter or Path(trained.model.base_model or "model"))
    models = {name: load_text_generator(trained.model, trained.adapter, **kept)}
    before = trained.config.model
    if trained.adapter is None and before.base_model == trained.model.base_model:
        logger.info("there is no base model to compare with: the config of its training is not beside it")
    elif base:
        # Loaded a second time: switching the adapter off would change what a CUDA graph or a compiled layer holds.
        models[BASE if name != BASE else "untrained"] = load_text_generator(before, None, **kept)
    return models


def run_vllm(target: str, overrides: list[str], *, port: int | None, python: str | None, show: bool) -> int:
    """Run vLLM's server on a trained model, an adapter on its base, and return its exit code."""
    from upweight.serve.command import trained_command
    from upweight.serve.process import installed_version, run_server

    trained = find_trained(target, overrides)
    name = name_of(trained.adapter or Path(trained.model.base_model or "model"))
    number = port if port is not None else 8000
    which = (trained.model, trained.adapter, name, trained.config.vllm)
    command = trained_command(*which, port=number, python=python or sys.executable)
    if show:
        print(shlex.join([*(f"{key}={value}" for key, value in command.env.items()), *command.argv]))
        return 0
    installed_version(command.argv[0])
    url = f"http://127.0.0.1:{number}"
    names = name if trained.adapter is None else f"{name}, {BASE}"
    return run_server(command, url, lambda: print(f"{url}/v1  (models: {names}; Ctrl-C ends it)", flush=True))
