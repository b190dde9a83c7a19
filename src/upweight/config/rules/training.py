"""Rules about training: batch sizes, sharding, schedules, evaluation, checkpoints, paths and the hub."""

import re
from collections.abc import Iterator
from math import ceil
from pathlib import PurePath
from typing import Any

from upweight.config.config import Config, general_keys
from upweight.config.peers import SCHEDULE_ARGS
from upweight.config.rules.data import entries
from upweight.config.sections.training import FROM_BITSANDBYTES, LOW_RANK
from upweight.config.zero import not_taken, zero_file, zero_options, zero_stage
from upweight.errors import UserError, did_you_mean
from upweight.settings import values_by_path
from upweight.user_modules import is_path

LONGEST_NAME = 255  # bytes that file systems allow in a name
# Hub repository names: at most 96 characters, no part begins or ends with a dash or dot, neither is doubled.
REPOSITORY = r"(?!.{97})(?!.*(--|\.\.))(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?"
PATH_KEYS = (  # keys that hold a path; `deepspeed` may hold options instead
    "output_dir", "resume_from_checkpoint", "dataset_prepared_path", "base_model", "base_model_config",
    "tokenizer_config", "gguf_file", "lora_model_dir", "nemo_gym_dir", "deepspeed",
)  # fmt: skip
NUMBER, WHOLE = "a number", "a whole number"  # kinds of values in SCHEDULE_ARGS
WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")
LONG_WARMUP = 0.5  # of all steps: a longer warm-up is no beginning
FAR = 1000  # times the method's learning rate, from which on a model is ruined or does not move
MOST_RATE = 5e-3  # beyond which a pretrained model is ruined by any method


def optimisation(config: Config) -> Iterator[str]:
    """Check batch sizes, intervals, options of the layers, and the optimizer's arguments, which are sent as text."""
    whole, micro, args = config.optim.batch_size, config.optim.micro_batch_size or 1, config.optim.optimizer_args
    if whole and whole % micro:
        yield f"batch_size: {whole} is not a multiple of micro_batch_size {micro}."
    for key, value in (("save_steps", config.run.save_steps), ("eval_steps", config.run.eval_steps)):
        if value is not None and value > 1 and value != int(value):
            yield f"{key}: a share below 1, or a whole number of steps, not {value:g}."
    if config.optim.torch_compile:
        yield "torch_compile: layers are not compiled, as tree shapes differ; attention and head are. Drop the key."
    yield from _checkpointing(config.optim.checkpointing_args)
    if config.optim.tiled_mlp and not config.optim.gradient_checkpointing:
        yield "tiled_mlp: needs 'gradient_checkpointing: true'; tiles save little while layers keep their activations."
    yield from _projected(config)
    if is_path(config.optim.optimizer):  # whose arguments are not sent as text
        if isinstance(args, str):
            yield f"optim_args: expected a mapping, whose values '{config.optim.optimizer}' gets by name, not {args!r}."
        return
    pairs = args.split(",") if isinstance(args, str) and args else []
    if any(len(pair.split("=")) != 2 or not pair.split("=")[0].strip() for pair in pairs):
        yield f"optim_args: expected 'name=value' pairs with commas between them, or a mapping, not {args!r}."
    wrong = [name for name, value in args.items() if not _is_plain_value(value)] if isinstance(args, dict) else []
    if wrong:
        yield f"optim_args.{wrong[0]}: expected a number, a switch or a word, which are handed over as text."


def _checkpointing(options: dict[str, Any]) -> Iterator[str]:
    """Check the options of gradient checkpointing."""
    if set(options) - {"use_reentrant", "every_layer", "keep"}:
        yield "gradient_checkpointing_kwargs: only 'use_reentrant', 'every_layer' and 'keep' are known."
    keep = options.get("keep")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 <= keep < 1):
        yield f"gradient_checkpointing_kwargs: 'keep' is a share of the free memory, from 0 to below 1, not {keep!r}."
    if keep is not None and options.get("every_layer"):
        yield "gradient_checkpointing_kwargs: 'every_layer' keeps nothing; drop it, or 'keep'."


def _projected(config: Config) -> Iterator[str]:
    """Check optimizers that treat some weights apart: GaLore, APOLLO, Muon."""
    name, targets = config.optim.optimizer, config.optim.optim_target_modules
    if name in LOW_RANK and not targets:
        yield f"optim_target_modules: {name} needs the linear layers to project; set it to 'all-linear'."
    if name in LOW_RANK and config.adapter.kind is not None:
        yield f"optimizer: {name} projects the gradients of whole weights, and an adapter has none; drop one of them."
    if targets and name not in LOW_RANK:
        yield f"optim_target_modules: {name} does not read it; use one of {', '.join(LOW_RANK)}, or drop the key."
    if name == "muon" and config.optim.optimizer_args:
        yield "optim_args: Muon has keys of its own, 'muon_momentum' and others; drop 'optim_args'."
    # A run's config.yaml has every key, with its default.
    keys = [key for key in type(config.optim).model_fields if key.startswith("muon_")]
    muon = [key for key in keys if getattr(config.optim, key) != type(config.optim).model_fields[key].default]
    if name != "muon" and muon:
        yield f"{muon[0]}: {name} does not read it; set 'optimizer: muon', or drop the key."
    if name in ("muon", *LOW_RANK) and (config.sharding.fsdp or config.sharding.deepspeed is not None):
        yield f"optimizer: {name} needs whole weights, not shards; use 'adamw_torch_fused', or drop fsdp and deepspeed."


def _is_plain_value(value: Any) -> bool:
    """Whether a value can be written in a line of `name=value` pairs."""
    return isinstance(value, bool | int | float) or (isinstance(value, str) and not set(",= ") & set(value))


def user_callbacks(config: Config) -> Iterator[str]:
    """Check that an entry of `callbacks` with options names one class."""
    for number, entry in enumerate(config.callbacks.callbacks):
        if isinstance(entry, dict) and (len(entry) != 1 or not is_path(next(iter(entry)))):
            yield f"callbacks[{number}]: expected 'mine.Name' or 'mine.Name: {{option: value}}', got {entry!r:.80}."


def schedules(config: Config) -> Iterator[str]:
    """Check the arguments of the learning rate schedule."""
    name, args = config.optim.scheduler, config.optim.scheduler_args
    known = SCHEDULE_ARGS.get(name, {})
    for key, value in args.items() if not is_path(name) else ():  # a user's function checks its own
        if key not in known:
            taken = f" It takes {', '.join(known)}." if known else " It takes none."
            yield f"lr_scheduler_kwargs.{key}: is no argument of '{name}'.{did_you_mean(str(key), known)}{taken}"
        elif not _is_of_kind(known[key], value):
            wanted = known[key] if isinstance(known[key], str) else f"one of {', '.join(known[key])}"
            yield f"lr_scheduler_kwargs.{key}: expected {wanted}, not {value!r}."
    if name == "warmup_stable_decay" and "num_decay_steps" not in args:
        yield "lr_scheduler_kwargs.num_decay_steps: missing. 'warmup_stable_decay' needs the length of the decay."
    floors = {"min_lr", "min_lr_rate"} & set(args)
    if name == "cosine_with_min_lr" and len(floors) != 1:
        yield "lr_scheduler_kwargs: 'cosine_with_min_lr' needs 'min_lr' or 'min_lr_rate'; or set cosine_min_lr_ratio."
    if config.optim.cosine_min_ratio is not None and (is_path(name) or not name.startswith("cosine")):
        yield f"cosine_min_lr_ratio: is for 'lr_scheduler: cosine', not for '{name}'. Drop one of them."


def _is_of_kind(wanted: str | list[str], value: Any) -> bool:
    if isinstance(wanted, list):
        return value in wanted
    return isinstance(value, int if wanted == WHOLE else int | float) and not isinstance(value, bool)


def schedule_values(config: Config) -> Iterator[str]:
    """Reject values with which a schedule would divide by zero or never decrease."""
    name, args, rate = config.optim.scheduler, config.optim.scheduler_args, config.optim.learning_rate or 0.0
    end: Any = args.get("lr_end", 1e-7)  # the default of transformers
    factor: Any = args.get("factor", 0.1)
    scale: Any = args.get("timescale", 1)
    if name == "polynomial" and _is_of_kind(NUMBER, end) and end >= rate:
        yield f"lr_scheduler_kwargs.lr_end: {end:g} is not below the learning rate, {rate:g}. Lower it."
    if name == "reduce_lr_on_plateau" and _is_of_kind(NUMBER, factor) and not 0 < factor < 1:
        yield f"lr_scheduler_kwargs.factor: a share between 0 and 1, not {factor:g}."
    if name == "inverse_sqrt" and _is_of_kind(WHOLE, scale) and scale < 1:
        yield f"lr_scheduler_kwargs.timescale: at least 1, not {scale}."


def evaluates(config: Config) -> bool:
    """Whether a run has evaluation data and evaluates."""
    return bool(config.data.test_datasets or config.data.val_set_size) and config.run.eval_strategy != "no"


def evaluation_is_there(config: Config) -> Iterator[str]:
    """Require evaluation data for keys that depend on evaluations."""
    depending = ("early_stopping_patience", "load_best_model_at_end", "eval_samples", "generate_samples")
    keys = [key for key in depending if config.set_keys.get(key)]
    keys += ["lr_scheduler: reduce_lr_on_plateau"] if config.optim.scheduler == "reduce_lr_on_plateau" else []
    keys += ["save_strategy: best"] if config.run.save_strategy == "best" else []
    if keys and not evaluates(config):
        remedy = "Set 'val_set_size' or 'test_datasets'"
        remedy += ", and drop 'eval_strategy: no'" if config.run.eval_strategy == "no" else ""
        yield f"{keys[0]}: needs something to evaluate on. {remedy}."


def held_out_answers(config: Config) -> Iterator[str]:
    """Check that an offline run can answer held-out prompts."""
    key = "eval_samples" if config.run.eval_samples else "generate_samples"
    if not config.run.answered_prompts:
        defaults = values_by_path(type(config.run)())  # which a run's config.yaml has
        for name, value in values_by_path(config.run).items():
            if name.startswith("generation_") and value != defaults[name]:
                yield f"{name}: nothing is answered. Set 'eval_samples', or drop the key."
    elif config.method.online:
        yield f"{key}: is for offline methods; an online run keeps the completions of its evaluations. Drop it."
    elif config.method.head != "tokens":
        yield f"{key}: a reward model ({config.method.name}) scores texts and writes none. Drop it."
    elif config.sharding.fsdp or config.sharding.deepspeed is not None:
        remedy = f"Drop it, or add {key}=0 to the command"
        yield f"{key}: answers are not sampled from sharded weights (fsdp, deepspeed). {remedy}."


def best_checkpoint(config: Config) -> Iterator[str]:
    """Check that a checkpoint is written at every evaluation, so that the best one can be loaded."""
    run = config.run
    if not run.load_best or run.save_strategy == "best" or not evaluates(config):
        return
    saving = (run.save_strategy, run.save_steps, run.saves_per_epoch)
    evaluating = (run.eval_strategy, run.eval_steps, run.evals_per_epoch)
    saves, evaluations = (
        "steps" if per_epoch else strategy or ("steps" if steps else "epoch")
        for strategy, steps, per_epoch in (saving, evaluating)
    )
    if saves != evaluations:
        lost = f"checkpoints are written by '{saves}', evaluations made by '{evaluations}': the best would be lost"
        yield f"load_best_model_at_end: {lost}. Set 'save_strategy: {evaluations}', or 'save_strategy: best'."
    elif saves == "steps" and run.save_steps and run.eval_steps:
        same_kind = (run.save_steps < 1) == (run.eval_steps < 1)  # a share of all steps, or a count
        if not same_kind or round(run.save_steps * 1e6) % round(run.eval_steps * 1e6):
            odd = f"'save_steps' ({run.save_steps:g}) is not a multiple of 'eval_steps' ({run.eval_steps:g})"
            yield f"load_best_model_at_end: {odd}: the best would be lost. Mend it, or set 'save_strategy: best'."


def shards(config: Config) -> Iterator[str]:
    """Reject keys that do not work with sharded weights, gradients or optimizer states."""
    section, adapter, optim = config.sharding, config.adapter, config.optim
    zero = section.deepspeed is not None
    if not section.fsdp and not zero:
        return
    if adapter.separate_reference:
        yield "rl_adapter_ref_model: a second model would not be sharded; drop it: the adapter is switched off instead."
    if config.method.precomputes_reference:
        yield "precompute_ref_log_probs: weights are sharded when training begins; drop it: so is the reference."
    if config.run.save_only_model and config.run.load_best:
        yield "save_only_model: the best checkpoint of sharded weights cannot be loaded without the rest; drop one key."
    if config.model.fp16:
        yield "fp16: sharded weights are computed in bfloat16 or float32; use 'bf16: true'."
    if optim.activation_offloading:
        yield (
            "activation_offloading: gathered weights would be taken for activations; drop it, or fsdp and deepspeed "
            "(`gradient_checkpointing: unsloth` and `offload` set it too: write `true`)."
        )
    if optim.tiled_mlp:
        yield "tiled_mlp: cannot be used with fsdp or deepspeed, where it was not tried; drop one of them."
    if optim.reference_offloading:
        yield "reference_offloading: is for a copy of weights whole on one device; drop it, or fsdp and deepspeed."
    if zero and config.method.reference_sync is not None:
        yield "sync_ref_model: a reference that follows is not in DeepSpeed's checkpoints; use 'fsdp: true' instead."
    if zero and section.context_parallel_size > 1:
        yield "deepspeed, context_parallel_size: DeepSpeed knows no ranks that share rows; use 'fsdp: true' instead."


def fsdp(config: Config) -> Iterator[str]:
    """Reject keys that FSDP2 does not support."""
    section = config.sharding
    if not section.fsdp:
        return
    if config.optim.optimizer in FROM_BITSANDBYTES:
        remedy = "use 'adamw_torch_8bit' or 'adamw_torch_fused', or on one device remove 'fsdp' and 'fsdp_config'"
        yield f"optimizer: bitsandbytes does not know the shards of FSDP; {remedy}."
    if config.run.save_only_model and section.state_dict == "SHARDED_STATE_DICT":
        yield "save_only_model: needs whole weights; set 'fsdp_config.state_dict_type: FULL_STATE_DICT'."
    if section.wrap_policy == "SIZE_BASED_WRAP":
        yield "fsdp_config.auto_wrap_policy: FSDP2 does not shard by size; use TRANSFORMER_BASED_WRAP, or drop the key."
    if section.final_state_dict != "FULL_STATE_DICT":
        yield "fsdp_config.final_state_dict_type: the result is always written whole; drop the key."


def deepspeed(config: Config) -> Iterator[str]:
    """Check DeepSpeed's options (that their file exists is for the checks of the machine), and quantised shards."""
    source, options = config.sharding.deepspeed, None
    missing = isinstance(source, str) and (too_long(source) or zero_file(source, config.folder) is None)
    try:
        options = None if source is None or missing else zero_options(source, config.folder)
    except UserError as error:
        yield str(error)
    yield from () if options is None else not_taken(options)
    if not config.sharding.fsdp and zero_stage(options or {}) != 3:
        return
    if config.adapter.load_in_8bit:
        yield "load_in_8bit: integers cannot be sharded; use 'load_in_4bit: true' or ZeRO-1 or 2, or drop 'fsdp'."
    if "bnb_4bit_quant_storage" in config.adapter.quantisation:
        yield "bnb_config_kwargs.bnb_4bit_quant_storage: shards have to lie in the dtype of the computation; drop it."


def paths(config: Config) -> Iterator[str]:
    """Reject paths that are empty or that no file system allows, and invalid names of repositories."""
    named: dict[str, Any] = {"chat_template_jinja": _file_of(config.data.chat_template_jinja)}
    for path in PATH_KEYS:
        section, key = general_keys()[path]
        named[path] = getattr(getattr(config, section), key.name)
    for entry, row in entries(config):
        files = row.data_files if isinstance(row.data_files, list) else [row.data_files]
        named |= {f"{entry}.path": row.path, f"{entry}.chat_template_jinja": _file_of(row.chat_template_jinja)}
        named |= {f"{entry}.data_files": name for name in files if name is not None and too_long(name)}
    for key, name in named.items():
        if isinstance(name, str) and not name.strip():
            yield f"{key}: is empty. Name a path, or drop the key."
        elif isinstance(name, str) and too_long(name):
            yield f"{key}: a name in it has over {LONGEST_NAME} bytes or a NUL: no file system allows it. Shorten it."
    hub = config.run.hub_model_id
    if hub is not None and not re.fullmatch(REPOSITORY, hub):
        yield f"hub_model_id: {hub!r:.100} is no repository: 'owner/name', at most 96 letters, digits, - _ and dots."


def _file_of(jinja: str | None) -> str | None:
    """Return the template's file, or None if the value is the template's text."""
    return None if jinja is None or any(mark in jinja for mark in ("{%", "{{", "\n")) else jinja


def too_long(name: str) -> bool:
    """Whether a part of a path is longer than file systems allow."""
    return "\0" in name or any(len(part.encode(errors="surrogatepass")) > LONGEST_NAME for part in PurePath(name).parts)


def without_effect(config: Config) -> Iterator[str]:
    """Warn about warm-up with a schedule that has none."""
    keys = [key for key in ("warmup_steps", "warmup_ratio") if config.set_keys.get(key)]
    if keys and config.optim.scheduler in WITHOUT_WARMUP:
        yield f"{keys[0]}: no effect with 'lr_scheduler: {config.optim.scheduler}', which has no warm-up"


def long_warmup(config: Config) -> Iterator[str]:
    """Warn about a warm-up that is most of a run, where the config says so without its data."""
    optim, steps = config.optim, max(config.optim.max_steps or 0, 0)  # a script has -1 for none
    key = "warmup_ratio" if optim.warmup_steps is None else "warmup_steps"
    length = (optim.warmup_ratio if optim.warmup_steps is None else optim.warmup_steps) or 0
    is_share = key == "warmup_ratio" or length < 1
    if optim.scheduler in WITHOUT_WARMUP or is_path(optim.scheduler) or not (steps or is_share):
        return
    if steps and warmup_is_long(warmup := ceil(length * steps) if is_share else int(length), steps):
        yield f"{key}: {warmup_text(warmup, steps, key)}"
    elif not steps and length > LONG_WARMUP:
        yield f"{key}: warm-up takes {length:.0%} of all steps, in which the learning rate rises from 0. Lower it."


def warmup_is_long(warmup: int, steps: int) -> bool:
    """Return whether most steps of a run are warm-up."""
    return warmup > steps * LONG_WARMUP


def warmup_text(warmup: int, steps: int, key: str = "warmup_steps") -> str:
    """Return what a long warm-up does to a run, and the remedy."""
    reached = "and never reaches its peak" if warmup >= steps else f"and reaches its peak at step {warmup + 1}"
    rises = f"the learning rate rises from 0 {reached}"
    return f"warm-up takes {warmup} of {steps} steps: {rises}. Set '{key}: 0', or train for more steps."


def without_evaluation(config: Config) -> Iterator[str]:
    """Warn about evaluation keys without evaluation data."""
    keys = [key for key in ("eval_steps", "evals_per_epoch", "eval_strategy") if config.set_keys.get(key)]
    held = config.data.test_datasets or config.data.val_set_size
    if keys and not held and config.run.eval_strategy != "no":
        yield f"{keys[0]}: nothing is evaluated without 'val_set_size' or 'test_datasets'"


def unusual_rate(config: Config) -> Iterator[str]:
    """Warn about a learning rate far from those that are usual for the method, with or without an adapter."""
    method, kind, rate = config.method, config.adapter.kind, config.optim.learning_rate or 0.0
    if "learning_rate" not in config.set_keys or "adam" not in config.optim.optimizer:  # others have other scales
        return
    if config.model.base_model is None:  # arguments of a script, before its trainer knows whether there is an adapter
        return
    if method.learning_rate / FAR < rate < method.learning_rate * FAR and rate <= MOST_RATE:
        return
    low, high = (method.learning_rate * factor for factor in ((1, 100) if kind else (0.1, 10)))
    which, effect = ("above", "ruins a model") if rate > high else ("below", "hardly moves a model")
    trained = f"with 'adapter: {kind}'" if kind else "where all weights train"
    usual = f"{_short(low)} to {_short(high)} is usual for {method.name} {trained}"
    for_adapter = method.lora_learning_rate or 10 * method.learning_rate  # within the range, not at its lower end
    advice = f"try 'learning_rate: {_short(for_adapter if kind else method.learning_rate)}'"
    yield f"learning_rate: {rate:g} is far {which} what is usual and {effect} that is pretrained: {usual}; {advice}"


def single_answers(config: Config) -> Iterator[str]:
    """Warn about steps of one row for a method whose KL estimate pairs prompts with the answers of other rows."""
    if config.method.default_batch > 1 and (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1) == 1:
        what = "a step of one answer has no other answer to estimate the KL from, which is then 0 in every step"
        yield f"micro_batch_size: {what}; 'micro_batch_size: 8' is usual and needs no more memory (upweight docs kto)"


def _short(rate: float) -> str:
    """Return a learning rate as it is written, 1e-5."""
    digits, _, exponent = f"{rate:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"


def harmful_settings(config: Config) -> list[str]:
    """Return the warnings about settings that spoil a run, in place of doing nothing."""
    return [text for rule in (unusual_rate, single_answers, long_warmup) for text in rule(config)]
