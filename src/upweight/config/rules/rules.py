"""Rules that look at several keys, by what they are about. Each yields what it has to say; all of them run."""

from collections.abc import Callable, Iterator
from itertools import combinations

from upweight.config.config import Config, how_to_choose
from upweight.config.resolve import generation_batch, group_size
from upweight.config.rules.ebft import ebft_keys_without_effect, features_are_what_rewards
from upweight.config.rules.switched_keys import switched_off
from upweight.config.sections.data import (
    FALLBACK_PREFIX,
    FORMAT_NAMES,
    TEMPLATE_ALIASES,
    TEMPLATE_NAMES,
    DataSection,
    DatasetRow,
)
from upweight.config.sections.environment import is_environment_reward
from upweight.errors import did_you_mean

Rule = Callable[[Config], Iterator[str]]


def check(config: Config, *, fragment: bool) -> tuple[list[str], list[str]]:
    """Errors and warnings about a config; a fragment is not asked for what only a whole config must have."""
    errors = ERRORS if fragment else (*ERRORS, *WHOLE_CONFIG)
    warnings = WARNINGS if fragment else (*WARNINGS, *WHOLE_CONFIG_WARNINGS)
    return (
        [message for rule in errors for message in rule(config)],
        [message for rule in warnings for message in rule(config)],
    )


EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("rl", "reward_model", "process_reward_model"),
    ("gradient_accumulation_steps", "batch_size"),
    ("warmup_steps", "warmup_ratio"),
    ("save_steps", "saves_per_epoch"),
    ("eval_steps", "evals_per_epoch"),
    ("embedding_lr", "embedding_lr_scale"),
    ("trl.generation_batch_size", "trl.steps_per_generation"),
    ("deepspeed", "fsdp"),
    ("trl.vllm_server_base_url", "trl.vllm_server_base_urls"),
    ("load_in_4bit", "load_in_8bit"),
    ("test_datasets", "val_set_size"),
    ("fp16", "bfloat16"),
)


def exclusive(config: Config) -> Iterator[str]:
    """Keys that cannot both be set."""
    on = {path for path, value in config.given.items() if value not in (False, 0, [], {}, "")}
    for keys in EXCLUSIVE:
        for first, second in combinations(keys, 2):
            if first in on and second in on:
                yield f"{second}: cannot be used with '{first}'. Keep one."


def model_and_adapter(config: Config) -> Iterator[str]:
    """Precision, quantisation, adapters, the head."""
    adapter, labels = config.adapter, config.model.num_labels
    if config.model.bf16 is True and config.model.fp16:
        yield "fp16: cannot be used with 'bf16: true'. Keep one."
    if (adapter.load_in_4bit or adapter.load_in_8bit) and adapter.kind is None:
        key, kind = ("load_in_4bit", "qlora") if adapter.load_in_4bit else ("load_in_8bit", "lora")
        yield f"{key}: quantised weights cannot be trained. Add 'adapter: {kind}'."
    if adapter.kind == "qlora" and not adapter.load_in_4bit:
        yield "adapter: qlora needs 'load_in_4bit: true'; without quantisation it is 'adapter: lora'."
    if adapter.folder and adapter.kind is None:
        yield "lora_model_dir: needs 'adapter: lora' (or qlora) to be continued."
    if config.method.head == "sequence_score" and labels != 1:
        yield f"num_labels: an outcome reward model has 1 output, not {labels}."
    if config.method.head == "step_score" and labels is not None and labels < 2:
        yield f"num_labels: a process reward model has at least 2 outputs, not {labels}."


def batches_and_rewards(config: Config) -> Iterator[str]:
    """Numbers that have to fit each other, and where rewards come from."""
    whole, micro = config.optim.batch_size, config.optim.micro_batch_size or 1
    weights, rewards = config.given.get("trl.reward_weights"), config.rollout.reward_funcs
    from_environment = [name for name in rewards if is_environment_reward(name)]
    if whole and whole % micro:
        yield f"batch_size: {whole} is not a multiple of micro_batch_size {micro}."
    # How many rewards an environment gives is known when it is there.
    if isinstance(weights, list) and rewards and not from_environment and len(weights) != len(rewards):
        yield f"trl.reward_weights: {len(weights)} weights for {len(rewards)} rewards. Give one for each."
    if from_environment and not config.environment.kind and not config.gym.enabled:
        name = from_environment[0]
        yield f"trl.reward_funcs: '{name}' is what an environment says: set 'environment.type' or use another."


def data(config: Config) -> Iterator[str]:
    """Sources, shards, what is held out, chat templates."""
    section = config.data
    if section.val_set_size > 1 and section.val_set_size != int(section.val_set_size):
        yield f"val_set_size: a share below 1, or a whole number of rows, not {section.val_set_size:g}."
    if section.shard_count and section.shard_index >= section.shard_count:
        yield f"dataset_shard_idx: must be below dataset_shard_num ({section.shard_count})."
    yield from _template("", section)
    for place, row in _entries(config):
        if row.path is None and row.data_files is None:
            yield f"{place}: names no data. Set 'path' or 'data_files'."
        if row.shards and row.shards_idx >= row.shards:
            yield f"{place}.shards_idx: must be below shards ({row.shards})."
        yield from _template(f"{place}.", row)


def _entries(config: Config) -> Iterator[tuple[str, DatasetRow]]:
    """Every entry of the data, behind its place."""
    for key, rows in (("datasets", config.data.datasets), ("test_datasets", config.data.test_datasets)):
        for number, row in enumerate(rows):
            yield f"{key}[{number}]", row


def _template(place: str, own: DataSection | DatasetRow) -> Iterator[str]:
    plain = (own.chat_template or "tokenizer_default").removeprefix(FALLBACK_PREFIX)
    if plain == "jinja" and not own.chat_template_jinja:
        yield f"{place}chat_template_jinja: missing. 'chat_template: jinja' needs the template's text or file."
    if plain not in (*TEMPLATE_NAMES, *TEMPLATE_ALIASES, "jinja", "tokenizer_default"):
        way_out = "'tokenizer_default' takes the model's own; 'jinja' yours."
        near = did_you_mean(plain, TEMPLATE_NAMES, 0.75)
        yield f"{place}chat_template: there is no template '{plain}'.{near} {way_out}"


def formats_are_known(config: Config) -> Iterator[str]:
    """The `type` of each entry, unless it is a function of the user's."""
    names = FORMAT_NAMES["ebft" if config.method.name == "ebft" else config.method.data]
    for place, row in _entries(config):
        if isinstance(row.type, str) and "." not in row.type and row.type not in names:
            problem = f"there is no format '{row.type}' here.{did_you_mean(row.type, names)}"
            way_out = "A function of your own is named file.function."
            yield f"{place}.type: {problem} Known: {', '.join(names)}. {way_out}"


def environments(config: Config) -> Iterator[str]:
    """What answers to a policy's turns: one thing, and all of it."""
    section, acts = config.environment, "environment.type" if config.environment.kind else "tools"
    if section.kind == "python" and section.class_path is None:
        yield "environment.class: missing. Name the class as 'file.Class'."
    if section.kind == "openenv" and section.url is None:
        yield "environment.url: missing. Name the server, such as 'http://127.0.0.1:8000'."
    needs = {"python": ("class",), "openenv": ("url", "reward", "columns", "text_field", "observation", "wait")}
    for kind, names in needs.items():
        stray = [f"environment.{name}" for name in names if f"environment.{name}" in config.given]
        if stray and section.kind != kind:
            yield f"{', '.join(stray)}: needs 'environment.type: {kind}'."
    if section.tools and section.kind == "openenv":
        yield "tools: an OpenEnv server brings its own. Drop one of 'tools' and 'environment.type: openenv'."
    if section.acts and config.rollout.rollout_func is not None:
        yield f"trl.rollout_func: cannot be used with '{acts}'. Keep one."
    if section.acts and config.gym.enabled:
        yield f"nemo_gym_enabled: cannot be used with '{acts}'. Keep one."
    if section.acts and config.method.name == "ebft":
        yield f"{acts}: needs rl: grpo, gdpo or rloo; ebft compares completions with the data's own answers."


def vllm(config: Config) -> Iterator[str]:
    """How the server is started, and when it may sample."""
    rollout = config.rollout
    if config.vllm.reasoning and not config.vllm.reasoning_parser:
        yield "vllm.reasoning_parser: missing. 'vllm.enable_reasoning' needs it."
    if rollout.async_prefetch and rollout.use_vllm and rollout.vllm_mode == "colocate" and config.method.online:
        yield "trl.async_prefetch: colocated vLLM sleeps while the trainer works. Use 'vllm_mode: server', or drop it."


def whole_config(config: Config) -> Iterator[str]:
    """What nothing can run without."""
    given, method = config.given, config.method.name
    if "base_model" not in given:
        yield "base_model: missing. Name the model to train: a hub id or a folder."
    if not given.get("datasets") and not given.get("nemo_gym_datasets"):
        yield "datasets: missing. List what to train on."
    rewarded = given.get("trl.reward_funcs") or config.gym.enabled or config.environment.kind
    if method in ("grpo", "gdpo", "rloo") and not rewarded:
        yield "trl.reward_funcs: missing. A group of completions is compared by rewards: name at least one."
    if method == "ebft" and not any(path.startswith("ebft.") for path in given):
        yield "ebft: missing. `rl: ebft` needs its block; `ebft: {mode: structured}` takes every default."
    asked = [key for key in ("early_stopping_patience", "load_best_model_at_end") if given.get(key)]
    if asked and not _evaluates(config):
        yield f"{asked[0]}: needs something to evaluate on. Set 'val_set_size' or 'test_datasets'."


def gym_is_complete(config: Config) -> Iterator[str]:
    """Rows, servers, and what agents need."""
    gym = config.gym
    if not gym.enabled:
        return
    if not gym.datasets:
        yield "nemo_gym_datasets: missing. List the rows and the servers that verify them."
    elif gym.auto_start and not gym.config_paths:
        yield (
            "nemo_gym_config_paths: needed to start the Gym; or set 'nemo_gym_auto_start: false' and start it yourself."
        )
    elif gym.multi_turn and not config.rollout.use_vllm:
        yield (
            "nemo_gym_multi_turn: needs 'trl.use_vllm: true': the Gym's agents ask a server for turns. Without the key "
            "rows with tools are played here, with any sampler."
        )
    if config.rollout.rollout_func is not None:
        yield "trl.rollout_func: cannot be used with 'nemo_gym_enabled'. Keep one."


def groups_fit_the_batch(config: Config) -> Iterator[str]:
    """Rollouts that have to be larger than asked for."""
    group = group_size(config)
    micro, accumulation = config.optim.micro_batch_size or 1, config.optim.accumulation or 1
    wanted = config.rollout.generation_batch_size or micro * (config.rollout.steps_per_generation or accumulation)
    step, made = micro * accumulation, generation_batch(config)
    if wanted % group == 0 and (made == wanted or step % wanted == 0):
        return
    for key, right in (("trl.generation_batch_size", made), ("trl.steps_per_generation", made // micro)):
        if key in config.given:
            yield (
                f"{key}: {wanted} completions do not hold whole groups of {group} and whole batches of {step}; "
                f"{made} are generated at a time, as by '{key}: {right}'."
            )
            return
    strided = config.method.name == "ebft" and "ebft.n_samples_per_prompt" in config.given
    key = "ebft.n_samples_per_prompt" if strided else "trl.num_generations"
    smallest = next(steps for steps in range(accumulation, accumulation + group + 1) if micro * steps % group == 0)
    yield (
        f"{key}: a batch of {wanted} does not hold whole groups of {group}; "
        f"{made} completions are generated at a time. "
        f"'gradient_accumulation_steps: {smallest}' would fit."
    )


def without_effect(config: Config) -> Iterator[str]:
    """Keys that do less than they seem to."""
    rollout, online = config.rollout, config.method.online
    if online and getattr(config.method, "mode", None) != "strided" and "sequence_len" in config.given:
        yield "sequence_len: no effect on prompts; 'max_prompt_length' and 'trl.max_completion_length' bound them"
    stray = [path for path in config.given if path.startswith(("lora_", "peft")) and path != "lora_model_dir"]
    if stray and config.adapter.kind is None:
        yield f"{', '.join(stray)}: no effect without 'adapter: lora'"
    if rollout.async_prefetch and not rollout.use_vllm and online:
        yield "trl.async_prefetch: without a vLLM server rollouts are produced ahead of training, not beside it"
    if rollout.lora_sync and rollout.use_vllm and config.adapter.kind is None and config.choice.rl is not None:
        yield "trl.vllm_lora_sync: there is no adapter to send; all weights are sent"
    if online and rollout.use_vllm and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        yield (
            "trl.top_p, trl.top_k, trl.min_p: the sampler's log-probs cover the tokens kept, the trainer's all: "
            "importance ratios are biased"
        )
    if config.model.pure_bf16:
        yield "bfloat16: weights are trained without float32 masters; at small learning rates most updates are lost"


def without_use(config: Config) -> Iterator[str]:
    """Keys that other parts of a whole config would have to answer."""
    stray = [path for path in config.given if path.startswith(("trl.", "vllm.", "nemo_gym_", "environment.", "tool"))]
    if stray and not config.method.online:
        yield f"{', '.join(stray)}: no effect with {how_to_choose(config.method.name)}: nothing is sampled"
    asked = [key for key in ("eval_steps", "evals_per_epoch", "eval_strategy") if config.given.get(key)]
    if asked and not _evaluates(config) and config.run.eval_strategy != "no":
        yield f"{asked[0]}: nothing is evaluated without 'val_set_size' or 'test_datasets'"


def _evaluates(config: Config) -> bool:
    return bool(config.data.test_datasets or config.data.val_set_size)


ERRORS: tuple[Rule, ...] = (
    exclusive, features_are_what_rewards, model_and_adapter, batches_and_rewards, data, environments, vllm,
)  # fmt: skip
WHOLE_CONFIG: tuple[Rule, ...] = (whole_config, formats_are_known, gym_is_complete)
WARNINGS: tuple[Rule, ...] = (groups_fit_the_batch, without_effect, ebft_keys_without_effect)
WHOLE_CONFIG_WARNINGS: tuple[Rule, ...] = (without_use, switched_off)
