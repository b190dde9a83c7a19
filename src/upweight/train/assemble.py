"""Build the parts of a trainer from a config, for runs from YAML and for scripts alike."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin, TrainerCallback, TrainingArguments, set_seed

from upweight.config import Config
from upweight.config.rules.feeds import PRECOMPUTED_STREAM, UNKNOWN_LENGTH
from upweight.config.sections.training import OptimSection
from upweight.data.prepare import Prepared, longest_of, prepare, prepare_given
from upweight.data.stream.ahead import EncodePool
from upweight.data.stream.build import build_feed, is_fed, script_feed, script_stream, streamed_evaluation
from upweight.data.stream.feed import RowFeed
from upweight.data.stream.source import StreamSource, stored_and_closed
from upweight.engine.context_parallel import require_shareable
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.methods import feature_matcher
from upweight.models.load import compute_dtype, dtype_of_weights, load_model, load_model_config, named_by
from upweight.models.processor import attach_processor, image_reader
from upweight.models.reference import SyncedReference
from upweight.models.tokenizer import choose_padding, load_tokenizer, take_chat_template
from upweight.rollout.ebft import with_blocks
from upweight.runs.files import unwritable_reason
from upweight.train.arguments import refuse_dispatch, set_for_feed, set_variables, step_size, training_arguments
from upweight.train.distill.load import TeacherLoader
from upweight.train.distill.teachers import LocalTeacher
from upweight.train.distributed.fsdp import build_sharding
from upweight.train.distributed.ranks import context_parallel_group, join_ranks, local_rank0_first
from upweight.train.loader import StepBatchSampler
from upweight.train.lr_groups import LrRule, lr_rules
from upweight.train.machine_checks import mps_problems
from upweight.train.objects import YAML_ONLY, Model, Objects, Tokenizer
from upweight.train.online.assemble import build_plan, build_rewards, build_rollouts
from upweight.train.online.environments import environment_setup
from upweight.train.online.feed import RolloutFeed
from upweight.train.policy import Policy, image_problems, load_policy, make_policy, trains_vision
from upweight.train.recording.callbacks import PlainModelAfterwards
from upweight.train.recording.run_folder import recording
from upweight.train.reference import LoadModel, SyncReference
from upweight.train.user_code import NONE, UserCode, load_user_code


@dataclass
class TrainerParts:
    """Everything that `MethodTrainer` is built from."""

    policy: Policy
    arguments: TrainingArguments
    train_dataset: Any = None
    eval_dataset: Any = None
    encode: Callable[..., Any] | None = None  # prepares rows that a script passes to `evaluate`
    rollouts: RolloutFeed | None = None  # yields the steps of an online method
    shuffle: bool = True
    allow_changed_data: bool = False  # on a resume
    lr_rule: LrRule | None = None
    callbacks: Sequence[TrainerCallback] = ()
    objects: Objects = YAML_ONLY
    user_code: UserCode = NONE
    recording: Callable[..., AbstractContextManager[Any]] | None = None  # context manager around a script's training


def assemble(config: Config, objects: Objects = YAML_ONLY, *, trains: bool = True) -> TrainerParts:
    """Build the parts of a trainer. With `trains`, weights may be loaded directly as shards."""
    set_variables(config.tracking)
    ranks, device = join_ranks(config.sharding.timeout, config.sharding.wait_timeout)
    device = _device(config, device if objects.arguments is None else objects.arguments.device)
    context = context_parallel_group(config.sharding.context_parallel_size)
    if context is not None:  # refuse models whose heads cannot be split over the ranks that share rows
        require_shareable(load_model_config(config.model), context.size)
    set_seed(config.optim.seed)
    tokenizer = _load_tokenizer(config, objects)
    data = _prepare_data(config, objects, tokenizer)
    first = _first_row(data.train, objects)
    env_setup = environment_setup(config, objects)
    rewards = build_rewards(config, device, list(first), env_setup, objects) if config.method.online else []
    steps, on_cpu = _steps_per_epoch(config, data.train, ranks.num_processes), device.type == "cpu"
    dtype, sharding = compute_dtype(config.model, device), build_sharding(config.sharding, ranks.num_processes)
    model = load_policy(config, objects, tokenizer, dtype, sharding, trains=trains)
    reads = image_reader(tokenizer) is not None and "images" in first
    optim = _with_images(config, model, ranks.num_processes) if reads else config.optim
    if objects.model is not None or objects.load_dtype is not None:  # the dtype of the loaded weights wins
        dtype = dtype_of_weights(model, dtype, device)
    arguments = training_arguments(
        config, objects.arguments, steps_per_epoch=steps, use_cpu=on_cpu, dtype=dtype, sharding=sharding
    )
    arguments.ddp_find_unused_parameters = reads and trains_vision(model)  # a rank's rows may have no image
    if isinstance(data.train, RowFeed):
        set_for_feed(arguments)
    user_code, online = NONE if objects.from_script else load_user_code(config), config.method.online_settings
    loader = TeacherLoader(config, objects, tokenizer, dtype, device, sharding)
    policy = make_policy(
        model,
        config.method,
        dtype,
        device,
        longest=_longest(config, data),
        tokenizer=tokenizer,
        optim=optim,
        section=config.model,
        separate_reference=_separate_reference(config, objects, dtype, tokenizer),
        load_teachers=loader if config.method.needs_teacher else None,
        prepared=data.folder,
        sharding=sharding,
        context=context,
    )
    return TrainerParts(
        policy,
        arguments,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        encode=data.encode,
        rollouts=build_rollouts(config, objects, policy, data.train, rewards, env_setup=env_setup) if online else None,
        shuffle=not (config.data.curriculum or config.data.curriculum_column),
        allow_changed_data=config.run.allow_changed_data,
        lr_rule=lr_rules(config.optim, config.adapter, model),
        callbacks=[*objects.callbacks, *(build() for build in user_code.callbacks), *_sync_callbacks(policy, objects)],
        objects=objects,
        user_code=user_code,
        recording=partial(recording, config=config, objects=objects) if objects.from_script else None,
    )


def _first_row(train: Dataset | RowFeed, objects: Objects) -> Mapping[str, Any]:
    """Return the first training row; raise for arguments that a feed cannot be read with."""
    if isinstance(train, RowFeed):
        refuse_dispatch(objects.arguments)
        return train.first()
    return train[0]


def _with_images(config: Config, model: Model, ranks: int) -> OptimSection:
    """Return the settings for rows with images; raise for those that do not go with them."""
    problems = list(image_problems(config, model, ranks))
    if config.gym.enabled:
        reason = "what a Gym's tools return is text, and its agents ask for completions of texts"
        problems.append(f"nemo_gym_enabled: {reason}; use rows without images, or 'environment.type: openenv'.")
    if problems:
        raise UserError("\n".join(problems))
    return config.optim.model_copy(update={"activation_offloading": False})  # `memory` may have set it


def _device(config: Config, device: torch.device) -> torch.device:
    """Return the device; raise where it is Apple's, on which the config cannot run."""
    if device.type == "mps" and (problems := list(mps_problems(config))):
        raise UserError("\n".join(problems))
    return device


def _load_tokenizer(config: Config, objects: Objects) -> Tokenizer:
    """Return the tokenizer of the script, else of the model. A script's EOS and padding tokens must be in it."""
    tokenizer = objects.tokenizer
    if isinstance(tokenizer, ProcessorMixin):
        of_model = load_model_config(config.model) if objects.model is None else objects.model.config
        tokenizer = attach_processor(tokenizer, of_model)
    if tokenizer is None and objects.model is not None and not objects.model.config.name_or_path:
        raise UserError("processing_class: the model was not loaded from anywhere: give its tokenizer.")
    if not objects.from_script:
        return load_tokenizer(config.model)
    tokens = config.model.special_tokens
    if tokenizer is None:
        tokenizer = load_tokenizer(config.model.model_copy(update={"special_tokens": type(tokens)()}))
    if objects.chat_template_path is not None:
        take_chat_template(tokenizer, objects.chat_template_path, trust_remote_code=config.model.trust_remote_code)
    for key, token in tokens.model_dump(exclude_none=True).items():
        if token not in tokenizer.get_vocab():
            raise UserError(f"{key}: the tokenizer does not know {token!r}.")
        setattr(tokenizer, key, token)
    if tokenizer.pad_token is None:
        choose_padding(tokenizer)
    return tokenizer


@dataclass(frozen=True)
class Data:
    """Prepared training and evaluation rows, and a function that prepares more."""

    train: Dataset | RowFeed
    evaluation: Any  # a Dataset, several by their names, or None
    folder: Path | None  # the cache of the prepared training rows; None: not cached
    encode: Callable[..., Dataset] | None = None  # (raw rows, name of their argument) -> prepared rows


def _prepare_data(config: Config, objects: Objects, tokenizer: Tokenizer) -> Data:
    """Prepare the rows of a run, and set the chat template that rendered them in the tokenizer."""
    if objects.read_rows is not None:
        return _script_data(config, objects, tokenizer)
    data = local_rank0_first(partial(prepare, config, tokenizer))
    if data is not None:
        _log_dropped_rows(data)
    streamed = streamed_evaluation(config, tokenizer)
    if streamed is not None and data is not None and data.evaluation is not None:
        raise UserError("test_datasets: some are streamed and some are not. Set 'streaming' alike for all of them.")
    if is_fed(config.data):
        return _fed_data(config, tokenizer, data, streamed)
    assert data is not None, "what is not streamed is prepared"
    if not len(data.train):
        raise UserError("\n".join(["datasets: no row is left to train on.", *data.report.lines()]))
    if data.template is not None:
        tokenizer.chat_template = data.template  # which is saved with the model
    evaluation, ebft = streamed or data.evaluation, feature_matcher(config.method)
    if ebft is None or not ebft.strided:
        return Data(data.train, evaluation, data.folder)
    train = with_blocks(data.train, ebft, "training")  # drops documents that are shorter than a block
    return Data(train, None if evaluation is None else with_blocks(evaluation, ebft, "evaluation"), data.folder)


def _fed_data(config: Config, tokenizer: Tokenizer, prepared: Prepared | None, streamed: Dataset | None) -> Data:
    """Return the feed of streams and mixtures; `prepared` are the rows that are not streamed, `streamed` evaluate."""
    fed = build_feed(config, tokenizer, prepared)
    if fed.template is not None:
        tokenizer.chat_template = fed.template
    fed.feed.prefetch()  # its processes start before the model takes memory
    return Data(fed.feed, streamed or (prepared and prepared.evaluation), prepared and prepared.folder)


def _script_data(config: Config, objects: Objects, tokenizer: Tokenizer) -> Data:
    """Prepare the rows that a script passes, in their order, through the same cache."""
    read, folder = objects.read_rows, Path(config.data.prepared_path).expanduser()
    assert read is not None
    cached = (why := unwritable_reason(folder.absolute())) is None
    if why is not None:
        warn_once(f"dataset_prepared_path: {why}; rows are prepared again each time. Name another folder.")

    def encode(
        raw: Any, where: str, *, keep: bool = cached, trains: bool = False, pool: EncodePool | None = None
    ) -> Prepared | StreamSource:
        rows, section = read(raw, where)
        if isinstance(rows, IterableDataset):
            row_config = dataclasses.replace(config, data=section)
            reading = EncodePool(config.data.processes) if pool is None else pool
            return script_stream(row_config, tokenizer, rows, where, reading, trains=trains)
        order = {"shuffle_merged": trains and section.shuffle_merged, "curriculum": False}
        row_config = dataclasses.replace(config, data=section.model_copy(update=order))
        work = partial(prepare_given, row_config, tokenizer, rows, where, trains=trains, keep=keep)
        data = local_rank0_first(work) if keep else work()
        _log_dropped_rows(data, objects.translate_error)
        return data

    def encode_eval(raw: Any, where: str = "eval_dataset", *, keep: bool = False) -> Dataset:
        if isinstance(raw, IterableDataset) and config.method.precomputes_reference:
            raise UserError(PRECOMPUTED_STREAM)
        data = encode(raw, where, keep=keep and cached)
        return data.train if isinstance(data, Prepared) else stored_and_closed(data)

    eval_sets = {name: encode_eval(rows, name, keep=True) for name, rows in objects.eval_sets().items()}
    evaluation = eval_sets if isinstance(objects.eval_dataset, Mapping) else eval_sets.get("eval_dataset")
    pool, given = EncodePool(config.data.processes), objects.train_sets()
    parts = {name: encode(rows, name, trains=True, pool=pool) for name, rows in given.items()}
    (first, *others) = parts.values()
    if isinstance(first, Prepared) and not others:
        return Data(first.train, evaluation, first.folder if cached else None, encode_eval)
    feed = script_feed(config, parts, pool)
    feed.prefetch()
    return Data(feed, evaluation, None, encode_eval)


def _log_dropped_rows(data: Prepared, translate_error: Callable[[str], str] = str) -> None:
    """Warn, on the main process, for each dataset of which rows were dropped or truncated."""
    for part, line in zip(data.report.parts, data.report.lines(), strict=False):  # its first lines are the parts
        if PartialState().is_main_process and (part.dropped or part.notes):
            logger.warning("%s", translate_error(line))


def _longest(config: Config, data: Data) -> int:
    """Return the tokens of the longest sequence with its completion; of a stream, what the settings allow."""
    online = config.method.online_settings
    sampled = online.max_completion_length if online else 0
    eval_sets = data.evaluation.values() if isinstance(data.evaluation, Mapping) else [data.evaluation]
    if not isinstance(data.train, RowFeed):
        return longest_of(data.train, *eval_sets) + sampled
    lengths = config.data
    bound = (lengths.max_prompt_length or 0) if config.method.data == "prompts" else lengths.sequence_len
    return max(bound, longest_of(*eval_sets)) + sampled


def _steps_per_epoch(config: Config, train: Dataset | RowFeed, ranks: int) -> int:
    """Return the number of optimizer steps in one pass over the rows; for a stream of unknown length, of the run."""
    ranks //= config.sharding.context_parallel_size
    rows = train.epoch_rows if isinstance(train, RowFeed) else len(train)
    if rows is None:
        if not config.optim.max_steps:
            raise UserError(UNKNOWN_LENGTH)
        return config.optim.max_steps
    if config.method.online:
        return build_plan(config, ranks).steps_per_epoch(rows)
    sampler = StepBatchSampler(rows, step_size(config) * ranks, 0, shuffle=False, drop_last=config.data.drop_last)
    return max(len(sampler), 1)


def _separate_reference(config: Config, objects: Objects, dtype: torch.dtype, tokenizer: Tokenizer) -> LoadModel | None:
    """Return a function that loads a separate reference model, or None where the initial policy is the reference."""
    reference, load = objects.reference, partial(load_model, dtype=dtype, seed=config.optim.seed)
    if isinstance(reference, str):
        return named_by("ref_model")(partial(load, config.model.model_copy(update={"base_model": reference})))
    if reference is not None:
        return lambda: reference
    return partial(load, config.model, tokenizer=tokenizer) if config.adapter.separate_reference else None


def _sync_callbacks(policy: Policy, objects: Objects) -> list[TrainerCallback]:
    """Return the callbacks that sync compute copies and the reference with the trained weights."""
    callbacks: list[TrainerCallback] = []
    if objects.from_script and policy.copies is not None:
        callbacks.append(PlainModelAfterwards(policy.copies, following=objects.optimizers[0] is None))
    taught = [] if policy.teachers is None else policy.teachers.by_name.values()
    references = [policy.reference, *(one.reference for one in taught if isinstance(one, LocalTeacher))]
    sync = policy.method.reference_sync
    if sync is not None:
        callbacks += [SyncReference(one, sync) for one in references if isinstance(one, SyncedReference)]
    return callbacks
