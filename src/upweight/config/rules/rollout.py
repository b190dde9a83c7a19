"""Rules about rollouts: rewards, sampling, vLLM, environments, NeMo Gym."""

import math
import re
from collections.abc import Iterator

from upweight.config.config import Config, how_to_choose
from upweight.config.generation_options import read_options
from upweight.config.resolve import generation_batch, group_size
from upweight.config.rules.keys import matching
from upweight.config.sections.environment import is_environment_reward
from upweight.config.sections.rollout import IN_PROCESS
from upweight.config.servers import LOOPBACK, adapter_alone, direct_transfer, is_local, server_urls, unloadable_by
from upweight.log import counted
from upweight.methods import feature_matcher

ONE_PROCESS = "colocated vLLM needs all weights in one process; use a vLLM server, or one process without sharding"
NO_PATTERN = "the sampler in process cannot be held to a pattern; use a vLLM server, or reward the format"
ONLY_MERGED = "vLLM cannot load such an adapter; drop the key, or send merged weights: 'trl.vllm_lora_sync: false'"
BACKENDS = (IN_PROCESS, "vllm_server", "vllm_colocate")
DEVICES = r"auto|cpu|cuda(:\d+(,\d+)*)?"


def rewards_and_sampling(config: Config) -> Iterator[str]:
    """Check the sources of rewards and their weights, sampling options, and those that only vLLM supports."""
    weights, named = config.set_keys.get("trl.reward_weights"), config.rollout.reward_funcs
    from_environment = [name for name in named if is_environment_reward(name)]
    # The number of rewards of an environment is known only when it runs.
    if isinstance(weights, list) and named and not from_environment and len(weights) != len(named):
        count = f"{counted(len(weights), 'weight')} for {counted(len(named), 'reward')}"
        yield f"trl.reward_weights: {count}. Give one for each, or leave it out."
    if from_environment and not config.environment.kind and not config.gym.enabled:
        name = from_environment[0]
        yield f"trl.reward_funcs: '{name}' is what an environment says: set 'environment.type', or name another reward."
    if config.method.online:
        yield from read_options(config.rollout.generation_args, others=config.rollout.use_vllm)[1]
    if config.method.online and config.rollout.regex is not None and not config.rollout.use_vllm:
        yield f"trl.vllm_structured_outputs_regex: {NO_PATTERN}."


def environments(config: Config) -> Iterator[str]:
    """Check that tools and environments are complete and do not exclude each other."""
    section, key = config.environment, "environment.type" if config.environment.kind else "tools"
    if section.kind == "python" and section.class_path is None:
        yield "environment.class: missing. Name the class as 'file.Class'."
    if section.kind == "openenv" and section.url is None:
        yield "environment.url: missing. Name the server, such as 'http://127.0.0.1:8000'."
    of_server = ("url", "reward", "columns", "text_field", "observation", "image", "wait")
    needs = {"python": ("class",), "openenv": of_server}
    for kind, names in needs.items():
        stray = [f"environment.{name}" for name in names if f"environment.{name}" in config.set_keys]
        if stray and section.kind != kind:
            yield f"{', '.join(stray)}: needs 'environment.type: {kind}'."
    if section.tools and section.kind == "openenv":
        yield "tools: an OpenEnv server defines the tools itself. Drop one of 'tools' and 'environment.type: openenv'."
    if section.acts and config.rollout.rollout_func is not None:
        yield f"trl.rollout_func: cannot be used with '{key}'. Keep one."
    if section.acts and config.gym.enabled:
        yield f"nemo_gym_enabled: cannot be used with '{key}'. Keep one."
    if section.acts and feature_matcher(config.method):
        yield f"{key}: needs rl: grpo, gdpo or rloo; ebft compares completions with the answers in the data."


def dotted_paths(config: Config) -> Iterator[str]:
    """Check that a config names functions and classes of the user's together with their file."""
    for key in ("trl.rollout_func", "trl.rollout_backend", "environment.class", "tools"):
        value = config.set_keys.get(key)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and "." not in path.strip(".") and path not in BACKENDS:
                yield f"{key}: there is no '{path}'. Name a function or a class as 'file.name'."


def backends(config: Config) -> Iterator[str]:
    """Check that one backend samples, and that a user's can read the weights."""
    rollout, sharding = config.rollout, config.sharding
    if rollout.rollout_backend is None:
        return
    for key, is_on in {"trl.use_vllm": rollout.use_vllm, "trl.rollout_func": rollout.rollout_func is not None}.items():
        if is_on:
            yield f"trl.rollout_backend: cannot be used with '{key}'. Keep one."
    if rollout.rollout_backend in BACKENDS[1:]:
        yield "trl.rollout_backend: vLLM is chosen by 'trl.use_vllm: true' and 'trl.vllm_mode'; drop it."
    if sharding.fsdp or sharding.deepspeed is not None:
        yield "trl.rollout_backend: needs all weights in each process; drop it, or train without sharding."


def routing_replay(config: Config) -> Iterator[str]:
    """Check that experts are recorded where completions are sampled, and forced where they are trained on."""
    rollout, sharding, key = config.rollout, config.sharding, "trl.routing_replay"
    if rollout.routing_replay is False or not config.method.online:
        return
    if config.gym.enabled and config.gym.multi_turn:
        yield f"{key}: the agents of the Gym return no experts. Drop it, or 'nemo_gym_multi_turn'."
    for name, value in {"rollout_func": rollout.rollout_func, "rollout_backend": rollout.rollout_backend}.items():
        if value is not None and value != IN_PROCESS:
            yield f"{key}: code of yours records no experts. Drop it, or 'trl.{name}'."
    if sharding.deepspeed is not None:
        problem = "routers are not tried on weights that DeepSpeed partitions"
        yield f"{key}: {problem}. Drop it, or shard with 'fsdp: true' in place of 'deepspeed'."
    if sharding.context_parallel_size > 1:
        yield f"{key}: experts of rows that ranks share are not replayed. Drop it, or 'context_parallel_size'."


def sampler_quantization(config: Config) -> Iterator[str]:
    """Check that weights in 8 bits can be made where completions are sampled, and that their effect is corrected."""
    rollout, sharding, key = config.rollout, config.sharding, "trl.sampler_quantization"
    if rollout.sampler_quantization is None or not config.method.online:
        return
    if rollout.use_vllm:
        yield f"{key}: is for sampling in this process. Drop it; 'vllm.quantization' is what vLLM starts with."
    for name, value in {"rollout_func": rollout.rollout_func, "rollout_backend": rollout.rollout_backend}.items():
        if value is not None and value != IN_PROCESS:
            yield f"{key}: code of yours reads the weights that train. Drop it, or 'trl.{name}'."
    if sharding.fsdp or sharding.deepspeed is not None:
        yield f"{key}: needs all weights in each process. Drop it, or train without sharding."
    adapter = config.adapter
    quantised = {"load_in_4bit": adapter.load_in_4bit, "load_in_8bit": adapter.load_in_8bit}
    for name in [name for name, is_on in quantised.items() if is_on] + ["use_onebitllms"] * config.model.ternary:
        yield f"{key}: the weights are quantised already. Drop it, or '{name}'."
    settings = config.method.online_settings
    if settings is not None and settings.sampler_correction is False:
        switch = "trl.vllm_importance_sampling_correction"
        remedy = f"drop '{switch}: false'" if switch in config.set_keys else "use rl: grpo or gdpo"
        yield f"{key}: without the importance correction training would drift. Drop it, or {remedy}."


def vllm(config: Config) -> Iterator[str]:
    """Check the options of the vLLM server and of colocated vLLM."""
    rollout = config.rollout
    if config.vllm.reasoning and not config.vllm.reasoning_parser:
        yield "vllm.reasoning_parser: missing. 'vllm.enable_reasoning' needs it."
    if not re.fullmatch(DEVICES, config.vllm.device):
        yield f"vllm.device: '{config.vllm.device}' is not known. Use auto, cpu, cuda, or a number: cuda:1."
    colocated = config.method.online and rollout.use_vllm and rollout.vllm_mode == "colocate"
    if colocated and rollout.async_prefetch:
        yield "trl.async_prefetch: colocated vLLM sleeps while the trainer works. Use 'vllm_mode: server', or drop it."
    if colocated and (config.sharding.fsdp or config.sharding.deepspeed is not None):
        yield f"trl.vllm_mode: {ONE_PROCESS}."
    if config.model.ternary and config.method.online and rollout.use_vllm:
        yield "use_onebitllms: vLLM would sample from weights that are not rounded. Drop 'trl.use_vllm'."


def adapters_for_vllm(config: Config) -> Iterator[str]:
    """Check that the adapter can be sent to vLLM, alone or merged."""
    adapter, lora_sync = config.adapter, config.rollout.lora_sync
    if adapter.kind is None or not config.method.online:
        return
    unloadable = unloadable_by(adapter)
    if lora_sync and unloadable is not None:
        yield f"{unloadable}: {ONLY_MERGED}."
    if lora_sync or not config.rollout.use_vllm:
        return
    if adapter.dora:
        yield "peft_use_dora: neither the adapter nor merged weights can be sent to vLLM; drop the key."
    elif not adapter_alone(adapter, lora_sync):
        key = unloadable or "trl.vllm_lora_sync"
        if config.sharding.fsdp or config.sharding.deepspeed is not None:
            yield f"{key}: an adapter cannot be merged into sharded weights; drop the key: the adapter alone is sent."
        if adapter.load_in_4bit or adapter.load_in_8bit:
            yield f"{key}: merged weights of a quantised base cannot be sent; drop the key: the adapter alone is sent."


def weight_transfer(config: Config) -> Iterator[str]:
    """Check the transfer of all weights to a server without a folder."""
    use, way = "use 127.0.0.1, or 'nccl' or 'folder'", direct_transfer(config)
    if way is None or config.rollout.vllm_mode != "server" or not config.method.online:
        return
    if config.sharding.fsdp or config.sharding.deepspeed is not None:
        yield "trl.vllm_weight_transfer: sharded weights can only be sent through a folder; use 'folder'."
    if way == "ipc" and not all(map(is_local, server_urls(config.rollout))):
        yield f"trl.vllm_weight_transfer: ipc shares the memory of a GPU here; {use}."
    elif way == "ipc" and config.vllm.host not in LOOPBACK:
        sent = f"ipc has the server run what it is sent, and vllm.host: {config.vllm.host} can be reached by others"
        yield f"trl.vllm_weight_transfer: {sent}; {use}."
    if way == "ipc" and config.vllm.tensor_parallel_size * config.vllm.data_parallel_size > 1:
        yield "trl.vllm_weight_transfer: ipc is for a server on the trainer's GPU alone; use 'nccl'."


def gym_is_complete(config: Config) -> Iterator[str]:
    """Require what NeMo Gym needs: rows, servers, and vLLM for its agents."""
    gym = config.gym
    if not gym.enabled:
        return
    if not gym.datasets:
        yield "nemo_gym_datasets: missing. List the rows and the servers that verify them."
    elif gym.auto_start and not gym.config_paths and any(dataset.server_name is None for dataset in gym.datasets):
        remedy = "Name the Gym's configs, give datasets a 'server_name', or start it: 'nemo_gym_auto_start: false'."
        yield f"nemo_gym_config_paths: missing, and a dataset names no server to start. {remedy}"
    elif gym.multi_turn and not config.rollout.use_vllm:
        yield "nemo_gym_multi_turn: needs 'trl.use_vllm: true', for agents; without the key the trainer runs episodes."
    if config.rollout.rollout_func is not None:
        yield "trl.rollout_func: cannot be used with 'nemo_gym_enabled'. Keep one."


def groups_fit_the_batch(config: Config) -> Iterator[str]:
    """Warn about rollouts that must be larger than configured."""
    group = group_size(config)
    micro, accumulation = config.optim.micro_batch_size or 1, config.optim.accumulation or 1
    wanted = config.rollout.generation_batch_size or micro * (config.rollout.steps_per_generation or accumulation)
    step, actual = micro * accumulation, generation_batch(config)
    if wanted % group == 0 and (actual == wanted or step % wanted == 0):
        return
    for key, right in (("trl.generation_batch_size", actual), ("trl.steps_per_generation", actual // micro)):
        if key in config.set_keys:
            misfit = f"{wanted} completions do not hold whole groups of {group} and whole batches of {step}"
            yield f"{key}: {misfit}; {actual} are generated at a time, as by '{key}: {right}'."
            return
    strided = feature_matcher(config.method) is not None and "ebft.n_samples_per_prompt" in config.set_keys
    key = "ebft.n_samples_per_prompt" if strided else "trl.num_generations"
    unit = group // math.gcd(micro, group)  # steps that hold whole groups
    smallest = math.ceil(accumulation / unit) * unit
    misfit = f"a batch of {wanted} does not hold whole groups of {group}; {actual} completions are generated at a time"
    yield f"{key}: {misfit}. 'gradient_accumulation_steps: {smallest}' would fit."


def without_effect(config: Config) -> Iterator[str]:
    """Warn about rollout keys with less effect than their names suggest."""
    rollout, online = config.rollout, config.method.online
    if online and not config.method.strided and "sequence_len" in config.set_keys:
        yield "sequence_len: no effect on prompts; 'max_prompt_length' and 'trl.max_completion_length' bound them"
    if config.method.formats() == "text" and config.data.max_prompt_length:
        yield "max_prompt_length: no effect on whole texts; 'sequence_len' bounds a prompt and its answer together"
    if rollout.async_prefetch and not rollout.use_vllm and online:
        yield "trl.async_prefetch: without a vLLM server rollouts are produced ahead of training, not beside it"
    if rollout.lora_sync and rollout.use_vllm and config.adapter.kind is None and config.choice.rl is not None:
        yield "trl.vllm_lora_sync: there is no adapter to send; all weights are sent"
    if online and rollout.use_vllm and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        yield "trl.top_p, trl.top_k, trl.min_p: only the trainer's log-probs cover all tokens: ratios are biased"
    limits = ("nemo_gym_verify_timeout", "nemo_gym_run_timeout")
    if config.gym.enabled and config.gym.multi_turn and all(key in config.set_keys for key in limits):
        yield "nemo_gym_verify_timeout: no effect on the rollouts of agents; 'nemo_gym_run_timeout' bounds them"


def without_use(config: Config) -> Iterator[str]:
    """Warn about rollout keys of offline methods."""
    stray = matching(config.set_keys, "trl.* vllm.* nemo_gym_* environment.* tool*")
    if stray and not config.method.online:
        yield f"{', '.join(stray)}: no effect with {how_to_choose(config.method.name)}: nothing is sampled"
