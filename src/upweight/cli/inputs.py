"""What commands are given: a config, a trained model (its config, folder or name), a file of JSON lines."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from upweight.config import Config, ConfigError, load_config, parse_config
from upweight.config.modernise import Spelling
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.config.yaml_file import apply_overrides, joined_options
from upweight.data.sources.first_look import swapped_roles
from upweight.errors import UserError
from upweight.log import inform_once, warn_once
from upweight.methods.base import Method
from upweight.runs.files import RECORD, holds_run, no_run_in, no_such_run, read_json

ADAPTER, RUN = "adapter_config.json", "config.yaml"
TABLES = (".csv", ".tsv", ".parquet")  # endings of files whose lines are no rows


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: all of it (`adapter` is None), or an adapter and the base model it belongs on."""

    model: ModelSection
    adapter: Path | None
    config: Config  # of the run that trained it if known, else the keys of the command line


def load_with_notices(
    path: Path, overrides: list[str] | None, *, fragment: bool = False, asks_hub: bool = True, whole: bool = False
) -> Config:
    """Load a config and show its notices, also where it has errors; those on names one by one if `whole`."""
    overrides = overrides or []
    try:
        config = read_config(path, overrides, fragment=fragment, asks_hub=asks_hub)
    except ConfigError as error:
        _show_notices(error.notices, path, overrides, whole, error.drafts)
        raise
    _show_notices(config.notices, path, overrides, whole, [config])
    return config


def _show_notices(
    notices: Sequence[str], path: Path, overrides: list[str], whole: bool, configs: Sequence[Config]
) -> None:
    # The config of a run has every key, so that only the keys of the command line are the user's.
    named = tuple(one.partition("=")[0] for one in overrides)
    shown = [notice for notice in notices if not is_of_run(path) or notice.startswith(named)]
    spellings = [notice for notice in shown if isinstance(notice, Spelling)]
    for notice in shown:
        if whole or len(spellings) < 2 or notice not in spellings:
            warn_once(notice)
    if not whole and len(spellings) > 1:
        what = f"{len(spellings)} notices on keys that have other names here or need not be set"
        inform_once(f"{what}: upweight validate {shlex.quote(str(path))} prints them")
    for warning in (warning for config in configs if not is_of_run(path) for warning in swapped_roles(config)):
        warn_once(warning)


def read_config(path: Path, overrides: list[str], *, fragment: bool = False, asks_hub: bool = True) -> Config:
    """Load the config of a command, with its `hub_timeout` in force."""
    folder = Path(read_json(path.parent / RECORD).get("config_folder", "")) if is_of_run(path) else None
    beside = folder if folder and folder.is_absolute() and folder.is_dir() else None  # the user's code is there
    config = load_config(path, overrides, fragment=fragment, folder=beside)
    if asks_hub:
        _limit_hub(config)
    return config


def is_of_run(path: Path) -> bool:
    """Return whether a config was written by a run, into its folder."""
    return path.name == RUN and (path.parent / RECORD).is_file()


def _limit_hub(config: Config) -> None:
    """Have `hub_timeout` bound every request to the hub: the library waits for ever for some, and 10 s for others."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    create = _http._GLOBAL_CLIENT_FACTORY  # it may set a proxy or certificates, and has no public getter
    if isinstance(create, partial) and create.func is _limited_client:  # of a config before this one
        (create,) = create.args
    seconds, is_set = config.run.hub_timeout, "hub_timeout" in config.run.model_fields_set
    set_client_factory(partial(_limited_client, create, seconds=seconds, always=is_set))


def _limited_client(create: Callable[[], Any], *, seconds: int, always: bool) -> Any:
    """Return a client of the hub whose requests end after some seconds: all, or those without a limit."""

    def limit(request: Any) -> None:
        limits = {} if always else request.extensions.get("timeout", {})
        kinds = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {kind: seconds if limits.get(kind) is None else limits[kind] for kind in kinds}

    client = create()
    client.event_hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], limit]}
    return client


def find_trained(target: str, overrides: list[str], *, or_base: bool = False) -> TrainedModel:
    """Return the model that a config trained (with `or_base` else its base), or the one of a folder or the hub."""
    path = Path(target).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        config = read_config(path, overrides)
        config = config.stages[-1] if config.stages else config
        for folder in map(Path, filter(None, (config.run.output_dir, config.adapter.folder))):
            if (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
                return _named_base(folder, config, overrides) or _of_run(folder, config)
        where = config.run.output_dir
        if not or_base:
            raise UserError(f"output_dir: {where} holds no trained model. Train it first: `upweight train CONFIG`.")
        warn_once(f"{where} holds no trained model: {config.model.base_model} is used, untrained")
        return TrainedModel(config.model, None, config)
    if not path.exists() and (path.suffix in (".yaml", ".yml") or not _may_be_on_hub(path)):
        hub = "" if "/" in target else " Models of the hub are named ORGANISATION/MODEL."
        raise UserError(no_such_run(path, "config, run or model folder") + hub)
    from upweight.runs.checkpoints import merge_is_stale, refuse_damaged
    from upweight.runs.record import require_trained

    refuse_damaged(path)
    if path.is_dir() and not any(path.glob("*.json")) and any(holds_run(one) for one in path.iterdir()):
        raise UserError(no_run_in(path))
    if merge_is_stale(path):
        warn_once(f"{path} was merged from an earlier adapter: merge again with `upweight merge-lora`")
    run = next((file for file in (path / RUN, path.parent / RUN) if path.is_dir() and file.is_file()), None)
    if run is not None:
        if not any(path.glob("*.gguf")):
            require_trained(path)
        return _of_run(path, read_config(run, overrides))
    if path.is_dir() and (path / RECORD).is_file():  # of a script, which has no config
        require_trained(path)
    content, adapter = {"base_model": str(path) if path.exists() else target}, None
    if (path / ADAPTER).is_file():
        named, adapter = json.loads((path / ADAPTER).read_text(encoding="utf-8")), path
        content = {"base_model": named.get("base_model_name_or_path"), "model_revision": named.get("revision")}
    config = parse_config(apply_overrides(content, overrides), folder=Path.cwd(), fragment=True)
    _limit_hub(config)
    return TrainedModel(config.model, adapter, config)


def _may_be_on_hub(path: Path) -> bool:
    """Return whether a name can be that of a model on the hub: few have no organisation, none begins with a folder."""
    if path.parent != Path() and path.parent.is_dir():
        return False
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+|(distil)?gpt2(-\w+)?", str(path)) is not None


def _named_base(folder: Path, config: Config, overrides: list[str]) -> TrainedModel | None:
    """Return the base model of the command line where what is in a run's folder does not belong on it, or None."""
    from upweight.runs.checkpoints import holds_adapter

    if not any(one.partition("=")[0].strip() == "base_model" for one in joined_options(overrides)):
        return None
    base = Path(config.model.base_model or "")
    is_adapter = (folder / ADAPTER).is_file()
    if is_adapter and not holds_adapter(base, folder):
        return None
    why = f"it has the adapter of {folder} in it" if is_adapter else f"not the model in {folder}"
    warn_once(f"base_model: {base} is used, {why}")
    return TrainedModel(config.model, None, config)


def _of_run(folder: Path, config: Config) -> TrainedModel:
    """Return the model or adapter in a folder, which a run with this config trained."""
    if (folder / ADAPTER).is_file():
        return TrainedModel(config.model, folder, config)
    section = ModelSection(base_model=str(folder), trust_remote_code=config.model.trust_remote_code)
    return TrainedModel(section, None, config)


def text_format_of(model: TrainedModel) -> tuple[DataSection, DatasetSpec | None, bool]:
    """Return how the training run formatted text: templates, step separator, and whether as chat messages."""
    data = model.config.data
    if not data.datasets:
        return data, None, False
    first = data.datasets[0]
    kind = first.type if isinstance(first.type, str) else ""
    family = next((name for name in ("chatml", "llama3", "zephyr") if kind.split(".")[0] == name), None)
    entry = DatasetSpec(
        step_separator=first.step_separator,
        chat_template=first.chat_template or (family if data.chat_template is None else None),
        chat_template_jinja=first.chat_template_jinja,
    )
    return data, entry, family is not None or "chat_template" in kind


def trained_on(model: TrainedModel) -> tuple[DatasetSpec, Method] | None:
    """Return the first dataset of the training run, if it is known, and the method that read it."""
    datasets = model.config.data.datasets
    return (datasets[0], model.config.method) if datasets else None


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file."""
    lines = lines_of(text_of(file), file)
    if not lines:
        raise UserError(f"{file}: expected one JSON object on each line")
    return [parse_row(line, where) for where, line in lines.items()]


def text_of(file: Path) -> str:
    """Return the text of a file of lines."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    if file.suffix.lower() in TABLES:
        kind, how = ("parquet", "") if file.suffix.lower() == ".parquet" else ("csv", ", sep=None, engine='python'")
        named = "{'YOUR COLUMN': 'prompt', 'YOUR ANSWERS': 'completion'}"
        read = f"pandas.read_{kind}({str(file)!r}{how}).rename(columns={named})"
        command = f"python -c \"import pandas; {read}.to_json({file.stem + '.jsonl'!r}, orient='records', lines=True)\""
        wanted = "JSON lines with a column `prompt`, to score also `completion`, are read"
        raise UserError(f"{file}: is a table, and {wanted}: `{command}` writes them")
    with utf8_from(file):
        return file.read_text(encoding="utf-8")


@contextmanager
def utf8_from(name: object) -> Iterator[None]:
    """Raise a UserError with the source of text that is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text. Save it as UTF-8.") from error


def lines_of(text: str, name: object) -> dict[str, str]:
    """Return the non-empty lines of a text by file and line; only \\n counts: JSON texts may hold other line ends."""
    return {f"{name}:{n}": line.rstrip("\r") for n, line in enumerate(text.split("\n"), 1) if line.strip()}


def parse_row(line: str, where: str, why: str = "") -> dict[str, Any]:
    """Parse the JSON object of a line; `why` is added to the error."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON{why}: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object")
    return row
