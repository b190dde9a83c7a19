"""Rules that look at several keys. Each returns its message, or None when all is well; all of them run."""

from collections.abc import Callable, Iterator
from itertools import combinations

from upweight.config.config import Config, how_to_choose
from upweight.config.data import FALLBACK_PREFIX, FORMAT_NAMES, TEMPLATE_ALIASES, TEMPLATE_NAMES, DatasetRow
from upweight.config.ebft_rules import (
    ebft_has_its_block,
    features_are_what_rewards,
    keys_of_the_other_mode,
    whitened_samples_are_orthogonal,
)
from upweight.config.environment import is_environment_reward
from upweight.config.explain import did_you_mean
from upweight.config.resolve import generation_batch, group_size

Rule = Callable[[Config], str | None]


def check(config: Config, *, fragment: bool) -> tuple[list[str], list[str]]:
    """Errors and warnings about a config; a fragment is not asked for what only a whole config must have."""
    rules = (*ERRORS, *(() if fragment else WHOLE_CONFIG))
    errors = [*exclusive(config), *(message for rule in rules if (message := rule(config)))]
    rules = (*WARNINGS, *(() if fragment else WHOLE_CONFIG_WARNINGS))
    return errors, [message for rule in rules if (message := rule(config))]


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


def exclusive(config: Config) -> list[str]:
    """Keys that cannot both be set."""
    on = {path for path, value in config.given.items() if value not in (False, 0, [], {}, "")}
    return [
        f"{second}: cannot be used with '{first}'. Keep one."
        for keys in EXCLUSIVE
        for first, second in combinations(keys, 2)
        if first in on and second in on
    ]


def model_is_named(config: Config) -> str | None:
    if "base_model" not in config.given:
        return "base_model: missing. Name the model to train: a hub id or a folder."
    return None


def data_is_named(config: Config) -> str | None:
    if not config.given.get("datasets") and not config.given.get("nemo_gym_datasets"):
        return "datasets: missing. List what to train on."
    return None


def rewards_are_named(config: Config) -> str | None:
    rewarded = config.given.get("trl.reward_funcs") or config.gym.enabled or config.environment.kind
    if config.method.name in ("grpo", "gdpo") and not rewarded:
        return "trl.reward_funcs: missing. A group of completions is compared by rewards: name at least one."
    return None


def half_precisions_exclude_each_other(config: Config) -> str | None:
    if config.model.bf16 is True and config.model.fp16:
        return "fp16: cannot be used with 'bf16: true'. Keep one."
    return None


def quantised_weights_need_an_adapter(config: Config) -> str | None:
    adapter = config.adapter
    key = "load_in_4bit" if adapter.load_in_4bit else "load_in_8bit"
    if (adapter.load_in_4bit or adapter.load_in_8bit) and adapter.kind is None:
        return f"{key}: quantised weights cannot be trained. Add 'adapter: {'qlora' if '4' in key else 'lora'}'."
    return None


def qlora_needs_4_bits(config: Config) -> str | None:
    if config.adapter.kind == "qlora" and not config.adapter.load_in_4bit:
        return "adapter: qlora needs 'load_in_4bit: true'; without quantisation it is 'adapter: lora'."
    return None


def adapter_folder_needs_an_adapter(config: Config) -> str | None:
    if config.adapter.folder and config.adapter.kind is None:
        return "lora_model_dir: needs 'adapter: lora' (or qlora) to be continued."
    return None


def batch_size_divides(config: Config) -> str | None:
    whole, micro = config.optim.batch_size, config.optim.micro_batch_size or 1
    if whole and whole % micro:
        return f"batch_size: {whole} is not a multiple of micro_batch_size {micro}."
    return None


def weights_match_rewards(config: Config) -> str | None:
    weights, rewards = config.given.get("trl.reward_weights"), config.rollout.reward_funcs
    if any(map(is_environment_reward, rewards)):
        return None  # how many rewards an environment gives is known when it is there
    if isinstance(weights, list) and rewards and len(weights) != len(rewards):
        return f"trl.reward_weights: {len(weights)} weights for {len(rewards)} rewards. Give one for each."
    return None


def labels_match_the_head(config: Config) -> str | None:
    labels = config.model.num_labels
    if config.method.head == "sequence_score" and labels != 1:
        return f"num_labels: an outcome reward model has 1 output, not {labels}."
    if config.method.head == "step_score" and labels is not None and labels < 2:
        return f"num_labels: a process reward model has at least 2 outputs, not {labels}."
    return None


def evaluation_has_data(config: Config) -> str | None:
    has_data = config.data.test_datasets or config.data.val_set_size
    asked = [key for key in ("eval_steps", "evals_per_epoch", "eval_strategy") if config.given.get(key)]
    if asked and not has_data and config.run.eval_strategy != "no":
        return f"{asked[0]}: nothing is evaluated without 'val_set_size' or 'test_datasets'"
    return None


def best_model_needs_evaluation(config: Config) -> str | None:
    asked = [key for key in ("early_stopping_patience", "load_best_model_at_end") if config.given.get(key)]
    if asked and not (config.data.test_datasets or config.data.val_set_size):
        return f"{asked[0]}: needs something to evaluate on. Set 'val_set_size' or 'test_datasets'."
    return None


def held_out_rows_are_whole(config: Config) -> str | None:
    size = config.data.val_set_size
    if size > 1 and size != int(size):
        return f"val_set_size: a share below 1, or a whole number of rows, not {size:g}."
    return None


def gym_is_complete(config: Config) -> str | None:
    gym = config.gym
    if gym.enabled and not gym.datasets:
        return "nemo_gym_datasets: missing. List the rows and the servers that verify them."
    if gym.enabled and gym.auto_start and not gym.config_paths:
        return (
            "nemo_gym_config_paths: needed to start the Gym; or set 'nemo_gym_auto_start: false' and start it yourself."
        )
    if gym.enabled and gym.multi_turn and not config.rollout.use_vllm:
        return (
            "nemo_gym_multi_turn: needs 'trl.use_vllm: true': the Gym's agents ask a server for turns. Without the key "
            "rows with tools are played here, with any sampler."
        )
    if gym.enabled and config.rollout.rollout_func is not None:
        return "trl.rollout_func: cannot be used with 'nemo_gym_enabled'. Keep one."
    return None


def environment_is_complete(config: Config) -> str | None:
    section, given = config.environment, config.given
    if section.kind == "python" and section.class_path is None:
        return "environment.class: missing. Name the class as 'file.Class'."
    if section.kind == "openenv" and section.url is None:
        return "environment.url: missing. Name the server, such as 'http://127.0.0.1:8000'."
    needs = {"python": ("class",), "openenv": ("url", "reward", "columns", "text_field", "observation", "wait")}
    for kind, names in needs.items():
        stray = [f"environment.{name}" for name in names if f"environment.{name}" in given]
        if stray and section.kind != kind:
            return f"{', '.join(stray)}: needs 'environment.type: {kind}'."
    return None


def one_thing_answers_to_turns(config: Config) -> str | None:
    if config.environment.tools and config.environment.kind == "openenv":
        return "tools: an OpenEnv server brings its own. Drop one of 'tools' and 'environment.type: openenv'."
    acts = "environment.type" if config.environment.kind else "tools"
    if config.environment.acts and config.rollout.rollout_func is not None:
        return f"trl.rollout_func: cannot be used with '{acts}'. Keep one."
    if config.environment.acts and config.gym.enabled:
        return f"nemo_gym_enabled: cannot be used with '{acts}'. Keep one."
    if config.environment.acts and config.method.name == "ebft":
        return f"{acts}: needs rl: grpo or rl: gdpo; ebft compares completions with the data's own answers."
    return None


def environment_reward_has_a_source(config: Config) -> str | None:
    named = [name for name in config.rollout.reward_funcs if is_environment_reward(name)]
    if named and not config.environment.kind and not config.gym.enabled:
        return f"trl.reward_funcs: '{named[0]}' is what an environment says: set 'environment.type' or use another."
    return None


def template_text_is_given(config: Config) -> str | None:
    data = config.data
    if data.chat_template == "jinja" and not data.chat_template_jinja:
        return "chat_template_jinja: missing. 'chat_template: jinja' needs the template's text or file."
    return None


def _entries(config: Config) -> Iterator[tuple[str, DatasetRow]]:
    """Every entry of the data, behind its place."""
    for key, rows in (("datasets", config.data.datasets), ("test_datasets", config.data.test_datasets)):
        for number, row in enumerate(rows):
            yield f"{key}[{number}]", row


def formats_are_known(config: Config) -> str | None:
    names = FORMAT_NAMES["ebft" if config.method.name == "ebft" else config.method.data]
    for place, row in _entries(config):
        if isinstance(row.type, str) and "." not in row.type and row.type not in names:
            problem = f"there is no format '{row.type}' here.{did_you_mean(row.type, names)}"
            way_out = "A function of your own is named file.function."
            return f"{place}.type: {problem} Known: {', '.join(names)}. {way_out}"
    return None


def templates_are_known(config: Config) -> str | None:
    named = [(f"{place}.chat_template", row.chat_template) for place, row in _entries(config)]
    for key, name in (("chat_template", config.data.chat_template), *named):
        plain = (name or "jinja").removeprefix(FALLBACK_PREFIX)
        if plain not in (*TEMPLATE_NAMES, *TEMPLATE_ALIASES, "jinja", "tokenizer_default"):
            way_out = "'tokenizer_default' takes the model's own; 'jinja' yours."
            return f"{key}: there is no template '{plain}'.{did_you_mean(plain, TEMPLATE_NAMES, 0.75)} {way_out}"
    return None


def reasoning_names_its_parser(config: Config) -> str | None:
    if config.vllm.reasoning and not config.vllm.reasoning_parser:
        return "vllm.reasoning_parser: missing. 'vllm.enable_reasoning' needs it."
    return None


def shard_exists(config: Config) -> str | None:
    if config.data.shard_count and config.data.shard_index >= config.data.shard_count:
        return f"dataset_shard_idx: must be below dataset_shard_num ({config.data.shard_count})."
    for number, row in enumerate(config.data.datasets):
        if row.shards and row.shards_idx >= row.shards:
            return f"datasets[{number}].shards_idx: must be below shards ({row.shards})."
    return None


def datasets_have_a_source(config: Config) -> str | None:
    for place, row in _entries(config):
        if row.path is None and row.data_files is None:
            return f"{place}: names no data. Set 'path' or 'data_files'."
    return None


def groups_fit_the_batch(config: Config) -> str | None:
    group = group_size(config)
    micro, accumulation = config.optim.micro_batch_size or 1, config.optim.accumulation or 1
    wanted = config.rollout.generation_batch_size or micro * (config.rollout.steps_per_generation or accumulation)
    step, made = micro * accumulation, generation_batch(config)
    if wanted % group == 0 and (made == wanted or step % wanted == 0):
        return None
    for key in ("trl.generation_batch_size", "trl.steps_per_generation"):
        if key in config.given:
            right = made if key == "trl.generation_batch_size" else made // micro
            return (
                f"{key}: {wanted} completions do not hold whole groups of {group} and whole batches of {step}; "
                f"{made} are generated at a time, as by '{key}: {right}'."
            )
    strided = config.method.name == "ebft" and "ebft.n_samples_per_prompt" in config.given
    key = "ebft.n_samples_per_prompt" if strided else "trl.num_generations"
    smallest = next(steps for steps in range(accumulation, accumulation + group + 1) if micro * steps % group == 0)
    return (
        f"{key}: a batch of {wanted} does not hold whole groups of {group}; "
        f"{made} completions are generated at a time. "
        f"'gradient_accumulation_steps: {smallest}' would fit."
    )


def sequences_are_not_cut_online(config: Config) -> str | None:
    strided = getattr(config.method, "mode", None) == "strided"
    if config.method.online and not strided and "sequence_len" in config.given:
        return "sequence_len: no effect on prompts; 'max_prompt_length' and 'trl.max_completion_length' bound them"
    return None


def adapter_keys_need_an_adapter(config: Config) -> str | None:
    stray = [path for path in config.given if path.startswith(("lora_", "peft")) and path != "lora_model_dir"]
    if stray and config.adapter.kind is None:
        return f"{', '.join(stray)}: no effect without 'adapter: lora'"
    return None


def rollout_keys_need_rollouts(config: Config) -> str | None:
    stray = [path for path in config.given if path.startswith(("trl.", "vllm.", "nemo_gym_", "environment.", "tool"))]
    if stray and not config.method.online:
        return f"{', '.join(stray)}: no effect with {how_to_choose(config.method.name)}: nothing is sampled"
    return None


def colocated_vllm_sleeps_while_training(config: Config) -> str | None:
    rollout = config.rollout
    if rollout.async_prefetch and rollout.use_vllm and rollout.vllm_mode == "colocate" and config.method.online:
        return "trl.async_prefetch: colocated vLLM sleeps while the trainer works. Use 'vllm_mode: server', or drop it."
    return None


def run_ahead_needs_a_server(config: Config) -> str | None:
    rollout = config.rollout
    if rollout.async_prefetch and not rollout.use_vllm and config.method.online:
        return "trl.async_prefetch: without a vLLM server rollouts are produced ahead of training, not beside it"
    return None


def adapter_sync_needs_an_adapter(config: Config) -> str | None:
    if config.rollout.lora_sync and config.adapter.kind is None and config.choice.rl is not None:
        return "trl.vllm_lora_sync: there is no adapter to send; all weights are sent"
    return None


def truncated_sampling_is_not_comparable(config: Config) -> str | None:
    rollout = config.rollout
    if config.method.online and rollout.use_vllm and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        return (
            "trl.top_p, trl.top_k, trl.min_p: the sampler's log-probs cover the tokens kept, the trainer's all: "
            "importance ratios are biased"
        )
    return None


def pure_bf16_loses_updates(config: Config) -> str | None:
    if config.model.pure_bf16:
        return "bfloat16: weights are trained without float32 masters; at small learning rates most updates are lost"
    return None


ERRORS: tuple[Rule, ...] = (
    half_precisions_exclude_each_other,
    features_are_what_rewards,
    quantised_weights_need_an_adapter,
    qlora_needs_4_bits,
    adapter_folder_needs_an_adapter,
    batch_size_divides,
    weights_match_rewards,
    labels_match_the_head,
    template_text_is_given,
    templates_are_known,
    environment_is_complete,
    one_thing_answers_to_turns,
    environment_reward_has_a_source,
    held_out_rows_are_whole,
    reasoning_names_its_parser,
    shard_exists,
    datasets_have_a_source,
    colocated_vllm_sleeps_while_training,
)
WHOLE_CONFIG: tuple[Rule, ...] = (
    model_is_named,
    data_is_named,
    formats_are_known,
    rewards_are_named,
    ebft_has_its_block,
    best_model_needs_evaluation,
    gym_is_complete,
)
WARNINGS: tuple[Rule, ...] = (
    groups_fit_the_batch,
    sequences_are_not_cut_online,
    adapter_keys_need_an_adapter,
    run_ahead_needs_a_server,
    adapter_sync_needs_an_adapter,
    truncated_sampling_is_not_comparable,
    pure_bf16_loses_updates,
    keys_of_the_other_mode,
    whitened_samples_are_orthogonal,
)
WHOLE_CONFIG_WARNINGS: tuple[Rule, ...] = (rollout_keys_need_rollouts, evaluation_has_data)
