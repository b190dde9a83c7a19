"""Checks a config before training: memory, data, rewards, environment, vLLM server and output folder."""

import dataclasses
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from transformers import AutoConfig

from upweight.config import Config
from upweight.config.rules.training import harmful_settings
from upweight.config.sections.training import LESS_MEMORY
from upweight.config.servers import samples_from_server, server_urls
from upweight.data.prepare import preview
from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.data.sources.first_look import swapped_roles
from upweight.data.summary import token_counts
from upweight.data.workers import LEFT_OUT
from upweight.doctor.findings import Finding
from upweight.errors import UserError
from upweight.log import counted
from upweight.models.adapters.attach import lora_config
from upweight.models.first_look import Stored, model_problems
from upweight.models.load import load_failures, load_model_config
from upweight.models.memory import GIB, Memory, empty_model, teacher_bytes
from upweight.models.memory_plan import plan_memory, trained_weights
from upweight.models.tokenizer import load_tokenizer
from upweight.rewards.load import KEY, load_rewards
from upweight.rollout.vllm.client import WITHOUT_SERVER, RequestFailed, RequestRefused, VllmClient
from upweight.rollout.vllm.probe import served_base
from upweight.runs.files import unwritable_reason
from upweight.runs.record import earlier_run
from upweight.train.machine_checks import check_machine
from upweight.train.online.environments import check_rewards, environment_setup

TIMEOUT_SECONDS = 5.0  # seconds to wait for a server's answer
MOST_DROPPED = 0.05  # largest share of dropped rows without a warning


@dataclass
class CheckState:
    """A config, and measurements of earlier checks that later checks use."""

    config: Config
    memory: Memory | None = None
    columns: list[str] | None = None  # data columns that rewards may read
    longest_prompt: int = 0


def check_config(config: Config) -> list[Finding]:
    """Return the findings about a config, or about each of its stages with the first stage's model."""
    findings: list[Finding] = []
    if config.stages:
        first = config.stages[0]
        adapter = first.adapter.model_copy(update={"folder": None})
        for stage in config.stages:
            # The later stages start from folders that do not exist yet.
            checked = dataclasses.replace(stage, model=first.model, adapter=adapter, stages=())
            name = Path(stage.run.output_dir).name
            findings += [dataclasses.replace(item, what=f"{name}: {item.what}") for item in check_config(checked)]
        return findings
    state = CheckState(config)
    for check in (_keys, _model, _adapter, _memory, _data, _rewards, _check_environment, _server, _output_dir):
        try:
            findings += check(state)
        except UserError as error:
            what, says = check.__name__.removeprefix("_"), str(error).removesuffix(".")
            key = says.partition(": ")[0]
            cause = says.partition(f"{state.config.model.base_model!r}: ")[2]
            same = (one for one in findings if one.what == key or (cause and one.says.endswith(cause)))
            earlier = next((one.what for one in same if one.level == "alarm"), None)
            findings.append(
                Finding("note", what, f"not checked, for the same cause as {earlier}")
                if earlier
                else Finding("alarm", key, says.partition(": ")[2])
                if key == "base_model"  # which the estimate of memory reads first
                else Finding("alarm", what, says)
            )
    return findings


def _keys(state: CheckState) -> Iterator[Finding]:
    harmful = harmful_settings(state.config)  # the others are about keys that do nothing
    for notice in state.config.notices:
        level = "warning" if notice in harmful else "note"
        yield Finding(level, "keys", notice.removesuffix("."))
    for warning in swapped_roles(state.config):
        yield Finding("warning", "columns", warning)
    for message in check_machine(state.config):
        key, _, text = message.partition(": ")
        yield Finding("alarm", key, text.removesuffix("."))
    yield Finding("ok", "keys", f"{len(state.config.set_keys)} set, for {state.config.method.label}")


def _model(state: CheckState) -> Iterator[Finding]:
    """Look at the folder of the model, which the estimate of memory reads no weights of."""
    for problem in model_problems(state.config):
        key, _, text = problem.partition(": ")
        yield Finding("alarm", key, text.removesuffix("."))


def _adapter(state: CheckState) -> Iterator[Finding]:
    """Look for the modules that a new adapter names in the model, of which no weights are read."""
    adapter, model = state.config.adapter, state.config.model
    named = adapter.targets or adapter.target_parameters or adapter.modules_to_save
    if adapter.kind is not None and adapter.folder is None and named:
        lora_config(empty_model(model, state.config.method.head), adapter)
    return iter(())  # what it looks for and does not find is an error


def _memory(state: CheckState) -> Iterator[Finding]:
    """Compare the memory estimate with the GPU's memory, or with host memory where there is no GPU."""
    plan = plan_memory(state.config)
    state.memory = plan.need
    if (missing := _stored(state.config).missing_packages()) is not None:
        says, _, remedy = missing.partition(": ")
        yield Finding("alarm", "base_model", says, remedy)
    evidence = {"needed_gib": round(plan.need.total / GIB, 2), "there_gib": round(plan.available / GIB, 2)}
    if plan.fits:
        yield Finding("ok", "memory", plan.line(), evidence=evidence)
    else:
        yield Finding(
            "alarm", "memory", f"{plan.line()}: it will not fit", f"in this order: {_remedies(state.config)}", evidence
        )


def _remedies(config: Config) -> str:
    """Return what needs less memory, the cheapest first, without what the config has, or its model does not allow."""
    trained = trained_weights(config)
    there = {
        "'adapter: lora'": trained != "all",
        "'adapter: qlora'": trained == "qlora" or not _stored(config).takes_4bit,
    }
    there["'memory: lean'"] = config.optim.memory == "lean"
    rest = [one for one in LESS_MEMORY.split("; ") if not any(is_set and key in one for key, is_set in there.items())]
    if teacher_bytes(config):
        is_quantised = config.teacher.load_in_4bit or config.teacher.load_in_8bit
        four_bits = "" if is_quantised else "'distill.teacher_load_in_4bit: true' or "
        rest.insert(1, f"{four_bits}a smaller 'distill.teacher'")
    return "; ".join(rest)


def _stored(config: Config) -> Stored:
    return Stored.of(getattr(load_model_config(config.model), "quantization_config", None))


def _data(state: CheckState) -> Iterator[Finding]:
    """Read, tokenize and measure the rows as training does."""
    config = state.config
    data = preview(config, load_tokenizer(config.model))
    lengths = data.report.lengths
    length_N3, _ = token_counts(data.train.data.table, config.method)  # of the rows that are kept
    state.longest_prompt, _, longest = map(int, length_N3.max(0, initial=0))
    positions = getattr(load_model_config(config.model).get_text_config(), "max_position_embeddings", None)
    for part, line in zip(data.report.parts, data.report.lines(), strict=False):
        # What users' own code leaves out, they have chosen.
        unasked = {why: count for why, count in part.dropped.items() if not why.startswith(LEFT_OUT.format(""))}
        if part.dropped or part.notes:
            settings = ", ".join(f"{key} {value['100%']}" for key, value in data.report.suggested.items())
            level = "warning" if sum(unasked.values()) > MOST_DROPPED * part.read else "note"
            remedy = f"to keep all: {settings}" if settings and unasked else ""
            if remedy and positions and lengths.get("sequence", {}).get("max", 0) > positions:
                remedy = f"some are longer than the {positions} positions of the model: shorten or split those rows"
            yield Finding(level, "data", line, remedy)
    sizes = ", ".join(f"{name}s of up to {row['max']} tokens" for name, row in lengths.items())
    if any(part.dropped for part in data.report.parts):
        sizes += ", rows that were left out among them"
    state.columns = [name for name in data.train[0] if name not in PREPARED_COLUMNS]
    columns = f" with the columns {', '.join(state.columns)}" if config.method.online and state.columns else ""
    says = f"{counted(len(data.train), 'row')} to train on{columns}; {sizes}"
    yield Finding("ok", "data", says, evidence={"rows": len(data.train), "lengths": lengths})
    online = config.method.online_settings
    if online is not None:
        longest = state.longest_prompt + online.max_completion_length
    if positions and longest > positions:
        says = f"rows of {longest} tokens, completions included, exceed the {positions} positions of the model"
        shorter = (
            f"sequence_len: {positions}" if online is None else "lower max_prompt_length or trl.max_completion_length"
        )
        yield Finding("alarm", "lengths", says, shorter)


def _rewards(state: CheckState) -> Iterator[Finding]:
    """Load reward functions, check that the data has the columns they read, and look up reward models."""
    config = state.config
    names = config.rollout.reward_funcs
    if not config.method.online or config.gym.enabled or config.environment.kind == "openenv":
        return
    setup = environment_setup(config)
    models = [name for name in names if "/" in name.partition("(")[0] or (config.folder / name).is_dir()]
    provided = setup.environment.reward_names if setup else ()
    rewards = load_rewards([name for name in names if name not in models], config.folder, environment=provided)
    if state.columns is not None:
        check_rewards(rewards, state.columns, setup)
    for name in models:
        source = str(config.folder / name) if (config.folder / name).is_dir() else name
        if not (Path(source) / "adapter_config.json").is_file():
            with load_failures(KEY, source, "reward model"):
                AutoConfig.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    if rewards or models:
        names = ", ".join([*(reward.name for reward in rewards), *models])
        yield Finding("ok", "rewards", f"{names} (there, but not called: `upweight rewards CONFIG` tries them)")


def _check_environment(state: CheckState) -> Iterator[Finding]:
    """Check that the environment's servers answer, or can be started."""
    config = state.config
    if not config.method.online or not (config.gym.enabled or config.environment.kind == "openenv"):
        return
    gym = Path(config.gym.folder).expanduser()
    if config.gym.enabled and config.gym.auto_start:
        missing, remedy = f"there is no NeMo Gym in {gym}", "clone it there, or set nemo_gym_dir"
        will_start = Finding("ok", "environment", f"NeMo Gym in {gym} will be started")
        yield will_start if gym.is_dir() else Finding("alarm", "environment", missing, remedy)
        return
    url = f"http://127.0.0.1:{config.gym.head_port}" if config.gym.enabled else str(config.environment.url)
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), TIMEOUT_SECONDS).close()
        yield Finding("ok", "environment", f"something listens at {url}")
    except OSError as error:
        remedy = "start its server, or correct the address"
        yield Finding("alarm", "environment", f"{url} does not answer: {error}", remedy)


def _server(state: CheckState) -> Iterator[Finding]:
    """Check that each vLLM server answers, serves the model and accepts the longest row."""
    config = state.config
    online = config.method.online_settings
    if online is None or not samples_from_server(config):
        return
    needed = state.longest_prompt + online.max_completion_length
    for url in server_urls(config.rollout):
        client = VllmClient(url, TIMEOUT_SECONDS)
        try:
            client.run(client.ask("/health", seconds=TIMEOUT_SECONDS))
            name, longest = client.run(served_base(client, config.model.base_model))
        except (RequestFailed, RequestRefused) as error:
            remedy = "start it with `upweight vllm-serve CONFIG`; check trl.vllm_server_host and trl.vllm_server_port"
            yield Finding("alarm", "server", f"{url} does not answer: {error}", f"{remedy}; {WITHOUT_SERVER}")
            continue
        if longest and needed > longest:
            says = f"{url} serves {longest} tokens, but prompts and completions reach {needed}"
            yield Finding("alarm", "server", says, f"start it with vllm.max_model_len: {needed}")
        else:
            yield Finding("ok", "server", f"{url} serves {name}, up to {longest} tokens")


def _output_dir(state: CheckState) -> Iterator[Finding]:
    """Check that the disk of the output folder has room for the checkpoints that are kept."""
    folder = Path(state.config.run.output_dir)
    if unwritable_reason(folder) is not None:
        return
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())).free
    needed = 0.0
    if state.memory is not None:
        kept = 0 if state.config.run.save_strategy == "no" else state.config.run.save_total_limit or 4
        needed = kept * state.memory.training + (state.memory.weights if state.config.adapter.kind is None else 0)
    need = "the need is unknown without the model" if state.memory is None else f"up to {needed / GIB:.1f} needed"
    says = f"{folder}: {free / GIB:.1f} GiB free, {need}"
    if needed > free:
        remedy = "lower save_total_limit, set save_only_model, or set another output_dir"
        yield Finding("warning", "output_dir", says, remedy)
    elif (earlier := earlier_run(folder)) is not None:
        remedy = f"{earlier.ways}; or set another output_dir"
        yield Finding("note", "output_dir", f"{says}; it holds {earlier.holds}", remedy)
    else:
        yield Finding("ok", "output_dir", says)
