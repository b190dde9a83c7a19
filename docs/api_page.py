"""Writes the end of `docs/api.md` from signatures, docstrings and the help of arguments: public names only."""

import dataclasses
import inspect
import re
from typing import Any

from transformers import TrainingArguments

import upweight
from upweight import types
from upweight.methods.base import Method
from upweight.settings import setting
from upweight.train.api import script_arguments, script_datasets
from upweight.train.api.configs import MethodArguments
from upweight.train.api.fields import help_of
from upweight.train.api.grpo_config import RolloutArguments
from upweight.train.trainer import MethodTrainer

# Of every trainer, beside those of transformers.
METHODS = ("train", "evaluate", "save_model", "create_model_card", "push_to_hub")
SHAPES = (types.Batch, types.Outputs, types.Loss, types.Mean, types.Extreme, types.Completion, types.Sampling)
SCRIPTS = (script_arguments.__name__, script_datasets.__name__)
FROM_TRANSFORMERS = {argument.name for argument in dataclasses.fields(TrainingArguments)}


def api() -> str:
    """Return what is made of the page: trainers, configs, functions of datasets, and shapes for users' methods."""
    public = {name: getattr(upweight, name) for name in upweight.__all__}
    trainers = {name: one for name, one in public.items() if name.endswith("Trainer")}
    scripts = {name: one for name, one in public.items() if one.__module__ in SCRIPTS}
    lines = ["", "## Trainers", "", "Every trainer has these methods, and those of `transformers.Trainer`.", ""]
    lines += _members(MethodTrainer, METHODS)
    for name, trainer in trainers.items():
        lines += ["", f"### {name}", "", *_callable(trainer, name)]
        extra = [member for member in vars(trainer) if member not in METHODS and _is_public(trainer, member)]
        lines += ["", *_members(trainer, extra)] if extra else []
    configs = {name: one for name, one in public.items() if name.endswith("Config") and name not in scripts}
    lines += ["", "## Configs", "", *_configs(configs), "", "## The command line of a script"]
    for name, one in scripts.items():
        lines += ["", f"### {name}", "", *(_dataclass(one) if dataclasses.is_dataclass(one) else _callable(one, name))]
    lines += ["", *_members(script_arguments.TrlParser, ["parse_args_and_config"])]
    lines += ["", "## Functions for datasets"]
    for name, function in public.items():
        if name[0].islower() and name not in scripts:
            lines += ["", f"### {name}", "", *_callable(function, name)]
    return "\n".join([*lines, "", *_for_methods(), ""])


def _configs(configs: dict[str, Any]) -> list[str]:
    """The arguments that all configs share, then those that each adds."""
    shared = {argument.name for argument in dataclasses.fields(MethodArguments)} - FROM_TRANSFORMERS
    online = {argument.name for argument in dataclasses.fields(RolloutArguments)} - FROM_TRANSFORMERS - shared
    lines = ["### Arguments of every config", "", *_arguments(MethodArguments, shared)]
    lines += ["", "### Arguments of GRPOConfig and RLOOConfig", "", *_arguments(RolloutArguments, online)]
    for name, config in configs.items():
        known = FROM_TRANSFORMERS | shared | (online if issubclass(config, RolloutArguments) else set())
        own = {argument.name for argument in dataclasses.fields(config)} - known
        lines += ["", f"### {name}", "", _first(config), "", *_arguments(config, own)]
    return lines


def _dataclass(one: Any) -> list[str]:
    return [_first(one), "", *_arguments(one, {argument.name for argument in dataclasses.fields(one)})]


def _arguments(config: Any, names: set[str]) -> list[str]:
    rows = []
    for argument in dataclasses.fields(config):
        about = help_of(argument)
        if argument.name in names and not about.no_effect and not about.refused:
            text = " ".join(str(about).split()).replace("|", "\\|")
            rows.append(f"| `{argument.name}` | `{_default(argument)}` | {text} |")
    return ["| argument | default | meaning |", "|---|---|---|", *rows] if rows else ["It adds no arguments."]


def _default(argument: "dataclasses.Field[Any]") -> str:
    if argument.default_factory is not dataclasses.MISSING:
        return repr(argument.default_factory())
    return (
        "required"
        if argument.default is dataclasses.MISSING
        else repr(getattr(argument.default, "value", argument.default))
    )


def _callable(one: Any, name: str) -> list[str]:
    """A signature with short types, without what is accepted and does nothing, and the docstring."""
    parameters = inspect.signature(one).parameters.values()
    shown = [part for part in parameters if part.name not in ("unknown", "self")]
    parts = [_short(str(part)) for part in shown if part.annotation not in (None, "None")]
    inside = "".join(f"    {part},\n" for part in parts)
    signature = f"{name}(\n{inside})" if parts else f"{name}()"
    return ["```python", signature, "```", "", inspect.getdoc(one) or ""]


def _members(one: Any, names: "list[str] | tuple[str, ...]") -> list[str]:
    lines = []
    for name in names:
        member = inspect.getattr_static(one, name)  # also of a base
        if isinstance(member, property):
            lines.append(f"- `{name}`: {_first(member.fget)}")
        else:
            arguments = [
                part for part in inspect.signature(member).parameters if part not in ("self", "args", "kwargs")
            ]
            lines.append(
                f"- `{name}({', '.join(part for part in arguments if not part.startswith('_'))})`: {_first(member)}"
            )
    return lines


def _is_public(one: Any, name: str) -> bool:
    member = vars(one)[name]
    return not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))


def _for_methods() -> list[str]:
    """What a user's method or sampler takes and returns."""
    lines = [
        "## For methods and samplers of your own",
        "",
        "### upweight.settings.setting",
        "",
        *_callable(setting, "setting"),
    ]
    lines += ["", "### upweight.methods.base.Method", "", inspect.getdoc(Method) or "", ""]
    lines += _members(Method, [name for name in vars(Method) if _is_public(Method, name)])
    lines += ["", "### upweight.types.Generator", "", inspect.getdoc(types.Generator) or "", ""]
    lines += _members(types.Generator, [name for name in vars(types.Generator) if _is_public(types.Generator, name)])
    for shape in SHAPES:
        source = inspect.getsource(shape)
        fields = re.split(r"\n\n?    (?:@|def )", source)[0].split("class ", 1)[1]
        lines += ["", f"### upweight.types.{shape.__name__}", "", "```python", f"class {fields.rstrip()}", "```"]
    return lines


def _first(one: Any) -> str:
    return (inspect.getdoc(one) or "").split("\n\n")[0].replace("\n", " ")


def _short(text: str) -> str:
    """Types without the modules they come from."""
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
