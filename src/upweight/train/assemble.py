"""The one way in which a run is put together, from YAML and by a script."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed

from upweight.config import Config
from upweight.data.prepare import Prepared, longest_of, prepare, prepare_given
from upweight.engine.context import Context, require_shareable
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.methods import feature_matcher
from upweight.models.load import compute_dtype, load_config, load_model
from upweight.models.precision import HALF
from upweight.models.tokenizer import choose_padding, load_tokenizer, take_chat_template
from upweight.rollout.ebft.strided_blocks import with_blocks
from upweight.runs.files import no_folder_at
from upweight.train.arguments import training_arguments
from upweight.train.distributed.fsdp import sharding_of
from upweight.train.distributed.ranks import join_ranks, rank0_first, share_rows
from upweight.train.loader import StepSampler
from upweight.train.lr_groups import lr_rules
from upweight.train.machine_checks import require_machine
from upweight.train.objects import YAML_ONLY, Objects
from upweight.train.online.assemble import plan_of, rewards_of, rollouts_of
from upweight.train.online.environments import environment_setup
from upweight.train.parts import TrainerParts
from upweight.train.policy import Policy, load_policy, make_policy
from upweight.train.recording.callbacks import PlainModelAfterwards
from upweight.train.recording.session import recording
from upweight.train.recording.trackers import set_variables
from upweight.train.reference.synced import SyncReference


def assemble(config: Config, objects: Objects = YAML_ONLY, *, trains: bool = True) -> TrainerParts:
    """Everything that computes, put together; with `trains`, weights may be loaded as only training needs them."""
    require_machine(config, trains=trains)
    set_variables(config.tracking)
    ranks, device = join_ranks(config.sharding.timeout)
    if objects.arguments is not None:
        device = objects.arguments.device
    context = _context(config)
    set_seed(config.optim.seed)
    tokenizer = _tokenizer(config, objects)
    data = _data(config, objects, tokenizer)
    env_setup = environment_setup(config, objects)
    rewards = rewards_of(config, device, data.columns, env_setup, objects) if config.method.online else []
    dtype, sharding = compute_dtype(config.model, device), sharding_of(config.sharding, ranks.num_processes)
    model = load_policy(config, objects, tokenizer, dtype, sharding, trains=trains)
    if objects.model is not None or objects.load_dtype is not None:  # half precision where such weights are
        dtype = next((p.dtype for p in model.parameters() if p.dtype in HALF), dtype)
    arguments = training_arguments(
        config,
        objects.arguments,
        steps_per_epoch=_steps_per_epoch(config, len(data.train), ranks.num_processes),
        use_cpu=device.type == "cpu",
        dtype=dtype,
        sharding=sharding,
    )
    policy = make_policy(
        model,
        config.method,
        dtype,
        device,
        longest=_longest(config, data),
        tokenizer=tokenizer,
        layout=config.model.layout,
        optim=config.optim,
        pure=config.model.pure_bf16,
        separate_reference=_separate_reference(config, objects, dtype, tokenizer),
        prepared=data.folder,
        sharding=sharding,
        context=context,
    )
    online = config.method.online
    return TrainerParts(
        policy,
        arguments,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        encode=data.encode,
        rollouts=rollouts_of(config, objects, policy, data.train, rewards, env_setup=env_setup) if online else None,
        shuffle=not config.data.curriculum,
        rate_of=lr_rules(config.optim, config.adapter, model),
        callbacks=[*objects.callbacks, *_callbacks(policy, objects)],
        optimizers=objects.optimizers,
        optimizer_class=objects.optimizer_class,
        recording=partial(recording, config=config, objects=objects) if objects.from_script else None,
    )


def _context(config: Config) -> Context | None:
    """The ranks that share this rank's rows, if any, where the model's heads can be shared."""
    context = share_rows(config.sharding.context_parallel_size)
    if context is not None:
        require_shareable(load_config(config.model), context.size)
    return context


def _tokenizer(config: Config, objects: Objects) -> PreTrainedTokenizerBase:
    """The tokenizer that was handed over, else the model's; a script's end and padding tokens have to be in it."""
    tokenizer = objects.tokenizer
    if tokenizer is None and objects.model is not None and not objects.model.config.name_or_path:
        raise UserError("processing_class: the model was not loaded from anywhere: give its tokenizer.")
    if not objects.from_script:
        return load_tokenizer(config.model)
    tokens = config.model.special_tokens
    if tokenizer is None:
        tokenizer = load_tokenizer(config.model.model_copy(update={"special_tokens": type(tokens)()}))
    if objects.chat_template_path is not None:
        take_chat_template(tokenizer, objects.chat_template_path, trust_remote_code=config.model.trust_remote_code)
    for key, token in (("eos_token", tokens.eos_token), ("pad_token", tokens.pad_token)):
        if token is not None and token not in tokenizer.get_vocab():
            raise UserError(f"{key}: the tokenizer does not know {token!r}.")
        if token is not None:
            setattr(tokenizer, key, token)
    if tokenizer.pad_token is None:
        choose_padding(tokenizer)
    return tokenizer


@dataclass(frozen=True)
class Data:
    """Prepared rows, and how further ones are prepared."""

    train: Dataset
    evaluation: Any  # a Dataset, several by their names, or None
    folder: Path | None  # of the prepared training rows, where they are kept
    encode: Callable[..., Dataset] | None = None  # raw rows, and the argument they came by -> prepared rows

    @property
    def columns(self) -> list[str]:
        """Columns that rewards and environments may read."""
        return list(self.train[0])


def _data(config: Config, objects: Objects, tokenizer: PreTrainedTokenizerBase) -> Data:
    """The rows of a run, with the chat template they were written by in the tokenizer."""
    if objects.read_rows is not None:
        return _script_data(config, objects, tokenizer)
    data = rank0_first(partial(prepare, config, tokenizer))
    if not len(data.train):
        raise UserError("\n".join(["datasets: no row is left to train on.", *data.report.lines()]))
    _log_dropped_rows(data)
    if data.template is not None:
        tokenizer.chat_template = data.template  # saved with the model, which knows no other
    held, method = data.evaluation, config.method
    feature_matching = feature_matcher(method)
    if feature_matching is not None and feature_matching.strided:  # documents that no block fits into are left out
        train = with_blocks(data.train, feature_matching, "training")
        return Data(train, None if held is None else with_blocks(held, feature_matching, "evaluation"), data.folder)
    return Data(data.train, held, data.folder)


def _script_data(config: Config, objects: Objects, tokenizer: PreTrainedTokenizerBase) -> Data:
    """The rows that a script hands over, in its order, through the same cache."""
    read, place = objects.read_rows, Path(config.data.prepared_path).expanduser()
    assert read is not None
    kept = (why := no_folder_at(place.absolute())) is None
    if why is not None:
        warn_once(f"dataset_prepared_path: {why}; rows are prepared anew each time. Name another folder.")

    def encoded(given: Any, where: str, *, keep: bool = kept, trains: bool = False) -> Prepared:
        rows, section = read(given, where)
        order = {"shuffle_merged": trains and section.shuffle_merged, "curriculum": False}
        read_by = dataclasses.replace(config, data=section.model_copy(update=order))
        work = partial(prepare_given, read_by, tokenizer, rows, where, trains=trains, keep=keep)
        data = rank0_first(work) if keep else work()
        _log_dropped_rows(data, objects.translate_error)
        return data

    train = encoded(objects.train_dataset, "train_dataset", trains=True)
    held = {name: encoded(rows, name).train for name, rows in objects.eval_sets().items()}
    several = isinstance(objects.eval_dataset, Mapping)
    return Data(
        train.train,
        held if several else held.get("eval_dataset"),
        train.folder if kept else None,
        lambda rows, where="eval_dataset": encoded(rows, where, keep=False).train,
    )


def _log_dropped_rows(data: Prepared, translate_error: Callable[[str], str] = str) -> None:
    """Say which entries lost rows or had rows cut: a run on less than its data must not look like one on all of it."""
    if not PartialState().is_main_process:
        return
    for part, line in zip(data.report.parts, data.report.lines(), strict=False):  # its first lines are the parts
        if part.dropped or part.notes:
            logger.warning("%s", translate_error(line))


def _steps_per_epoch(config: Config, rows: int, ranks: int) -> int:
    """Optimizer steps in which every row comes up once."""
    ranks //= config.sharding.context_parallel_size
    if config.method.online:
        return plan_of(config, ranks).steps_per_epoch(rows)
    batch = (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1) * ranks
    return max(len(StepSampler(rows, batch, 0, shuffle=False, drop_last=config.data.drop_last)), 1)


def _longest(config: Config, data: Data) -> int:
    """Tokens of the longest sequence that the policy will see; of prompts, with what it may write."""
    held = data.evaluation if isinstance(data.evaluation, Mapping) else {"": data.evaluation}
    policy = config.method.policy_settings
    return longest_of(data.train, *held.values()) + (0 if policy is None else policy.max_completion_length)


def _separate_reference(
    config: Config, objects: Objects, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> Callable[[], Any] | None:
    """What gives the model that the policy is compared with, where it is not the policy's own start."""
    given, seed = objects.reference, config.optim.seed
    if isinstance(given, str):
        section = config.model.model_copy(update={"base_model": given})
        return partial(load_model, section, dtype, seed=seed)
    if given is not None:
        return lambda: given
    if config.adapter.separate_reference:
        return partial(load_model, config.model, dtype, tokenizer=tokenizer, seed=seed)
    return None


def _callbacks(policy: Policy, objects: Objects) -> list[TrainerCallback]:
    """What keeps weights that follow others in step."""
    callbacks: list[TrainerCallback] = []
    if objects.from_script and policy.copies is not None:
        callbacks.append(PlainModelAfterwards(policy.copies, following=objects.optimizers[0] is None))
    synced = policy.method.reference_sync
    if policy.reference is not None and synced is not None:
        callbacks.append(SyncReference(policy.reference, synced))
    return callbacks
