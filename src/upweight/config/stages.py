"""Parses `stages`: each stage overrides the common keys and starts from the result of the stage before it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from upweight.config.config import Config, ConfigError, blocks, general_keys, method_keys
from upweight.config.explain import brief
from upweight.config.yaml_file import copy_tree
from upweight.errors import UserError
from upweight.methods import METHODS

ROLLOUT_SECTIONS = ("rollout", "vllm", "gym")
STARTING_POINT = ("base_model", "lora_model_dir")


def parse_stages(
    content: dict[Any, Any], parse: Callable[[dict[Any, Any]], Config], method_of: Callable[[dict[Any, Any]], str]
) -> Config:
    """Return the last stage's config with all in `stages`; `parse` reads a stage and `method_of` names its method."""
    stages = _check_stages(content["stages"])
    common = {key: value for key, value in content.items() if key != "stages"}
    merged = [_merge_stage(common, {key: value for key, value in stage.items() if key != "name"}) for stage in stages]
    methods = [method_of(whole) for whole in merged]
    errors: list[str] = []
    notices: list[str] = []
    configs: list[Config] = []
    for number, (stage, whole) in enumerate(zip(stages, merged, strict=True)):
        _drop_unread_keys(whole, stage, methods[number], methods)
        try:
            configs.append(parse(whole))
        except UserError as error:
            notices += error.notices if isinstance(error, ConfigError) else ()
            errors += [_with_stage_prefix(line, number, stage, common) for line in str(error).splitlines()]
    errors += _stage_errors(stages, configs) if not errors else []
    if errors:
        raise ConfigError(errors, [*notices, *(notice for config in configs for notice in config.notices)])
    return _chain_stages(stages, configs)


def _check_stages(stages: Any) -> list[dict[str, Any]]:
    if not isinstance(stages, list) or not stages:
        raise UserError(f"stages: expected a list of stages, each a mapping of keys, got {brief(stages)}")
    for number, stage in enumerate(stages):
        if not isinstance(stage, dict):
            raise UserError(f"stages[{number}]: expected a mapping of keys, got {brief(stage)}")
        if "stages" in stage:
            raise UserError(f"stages[{number}].stages: stages cannot hold stages")
        if "output_dir" in stage:
            raise UserError(f"stages[{number}].output_dir: every stage writes to a subfolder of the common output_dir")
        if stage.get("name") is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", str(stage["name"])):
            raise UserError(f"stages[{number}].name: names a folder: letters, digits, '.', '-', '_' only, at most 200")
    return stages


def _merge_stage(common: dict[Any, Any], stage: dict[Any, Any]) -> dict[Any, Any]:
    """Return the common keys overridden by a stage's keys; blocks such as `trl` are merged key by key."""
    whole = copy_tree(common)
    for key, value in stage.items():
        both = key in blocks() and isinstance(whole.get(key), dict) and isinstance(value, dict)
        whole[key] = {**whole[key], **value} if both else value
    return whole


def _drop_unread_keys(whole: dict[Any, Any], stage: dict[Any, Any], method: str, methods: Sequence[str]) -> None:
    """Remove common keys that only the methods of other stages read."""
    for path, readers in method_keys().items():
        if path not in general_keys() and method not in readers and any(name in readers for name in methods):
            _drop(whole, stage, path)
    if not METHODS[method].online and any(METHODS[name].online for name in methods):
        for path, (section, _) in general_keys().items():
            if section in ROLLOUT_SECTIONS:
                _drop(whole, stage, path)


def _drop(whole: dict[Any, Any], stage: dict[Any, Any], path: str) -> None:
    block, _, name = path.rpartition(".")
    merged, override = (whole.get(block), stage.get(block)) if block else (whole, stage)
    if isinstance(merged, dict) and not (isinstance(override, dict) and name in override):
        merged.pop(name, None)


def _with_stage_prefix(line: str, number: int, stage: dict[Any, Any], common: dict[Any, Any]) -> str:
    """Prefix an error with its stage, unless it is about a key that all stages share."""
    path = re.split(r"[:,]", line, maxsplit=1)[0]
    root, _, rest = path.partition(".")
    root, rest = root.split("[")[0], rest.split("[")[0]
    override = stage.get(root)
    in_block = not rest or root not in blocks() or not isinstance(override, dict) or rest in override
    return line if root in common and not (root in stage and in_block) else f"stages[{number}].{line}"


def _stage_errors(stages: Sequence[dict[str, Any]], configs: Sequence[Config]) -> list[str]:
    """Return an error for each stage that cannot start from the result of the stage before it."""
    errors = []
    for number, (before, config) in enumerate(pairwise(configs), 1):
        new_head = before.adapter.kind and config.adapter.kind and before.method.head != config.method.head
        if new_head and not any(key in stages[number] for key in STARTING_POINT):
            problem = "a new score head cannot be trained on the adapter of the stage before"
            errors.append(f"stages[{number}]: {problem}; train this stage with 'adapter: null', which merges it first")
    return errors


def _chain_stages(stages: Sequence[dict[str, Any]], configs: Sequence[Config]) -> Config:
    """Give each stage an output folder and make it start from the result of the stage before it."""
    top = Path(configs[-1].run.output_dir)
    chained: list[Config] = []
    for number, (stage, config) in enumerate(zip(stages, configs, strict=True)):
        folder = top / f"stage-{number + 1}-{stage.get('name') or config.method.name}"
        placed = dataclasses.replace(config, run=config.run.model_copy(update={"output_dir": str(folder)}))
        starts_anew = number == 0 or any(stage.get(key) is not None for key in STARTING_POINT)
        chained.append(placed if starts_anew else continued(chained[-1], placed))
    notices = tuple(dict.fromkeys(notice for config in chained for notice in config.notices))
    whole = chained[-1].run.model_copy(update={"output_dir": str(top)})
    return dataclasses.replace(chained[-1], run=whole, stages=tuple(chained), notices=notices)


def continued(before: Config, stage: Config) -> Config:
    """Return the config of a stage that starts from the model or adapter which the stage before it wrote."""
    folder = Path(before.run.output_dir)
    about_base = ("gguf_file", "revision", "config_source", "tokenizer", "tokenizer_class")
    if before.adapter.kind and stage.adapter.kind:
        model = {name: getattr(before.model, name) for name in ("base_model", *about_base)}
        adapter = stage.adapter.model_copy(update={"folder": str(folder)})
    else:
        model = {"base_model": str(folder / "merged" if before.adapter.kind else folder), **dict.fromkeys(about_base)}
        adapter = stage.adapter
    return dataclasses.replace(stage, model=stage.model.model_copy(update=model), adapter=adapter)
