"""Rules about rows whose order is decided while they are trained on: streams and mixtures."""

from collections.abc import Iterator
from pathlib import Path

from upweight.config.config import Config
from upweight.config.peers import FORMAT_NAMES
from upweight.config.rules.data import entries
from upweight.config.sections.data import DatasetSpec, UserFormat
from upweight.log import counted
from upweight.methods.base import Method

FED = "streams or interleaved datasets"
PRECOMPUTED_STREAM = (
    "precompute_ref_log_probs: is not supported with IterableDataset or 'streaming', whose rows are read while "
    "training. Leave it out."
)
UNKNOWN_LENGTH = (
    "max_steps: needed to train on a stream, whose length is not known. Set how many optimizer steps to train."
)
PACKED = (".gz", ".bz2", ".xz", ".zst")
COUNTED = "parquet"  # the only files that say how many rows they have before they are read
SPLITTING = ("completion", "pretrain", "ebft_chat_multiturn.transform_all_turns")  # formats: a row may become several
UNCOUNTED = {".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".arrow"}


def streams(config: Config) -> Iterator[str]:
    """Check what cannot be done with a stream, which is read in order and never held as a whole."""
    data, streamed = config.data, [(key, row) for key, row in entries(config) if row.streaming]
    remembering = (
        ("dataset_exact_deduplication", data.deduplicate),
        ("dataset_near_deduplication", data.near_duplicates),
        ("dataset_contamination_check", data.contamination),
    )
    for key, asked in remembering:
        if streamed and asked:
            yield f"{key}: compares all rows, and a stream never holds them. Clean its files first, or do not stream."
    if streamed and config.method.precomputes_reference:
        yield PRECOMPUTED_STREAM
    for key, row in streamed:
        if row.shards:
            yield f"{key}.shards: a stream cannot be cut into shards. Leave it out, or 'streaming'."
        if row.split and "[" in row.split:
            yield f"{key}.split: a stream has no slices. 'max_samples' takes its first rows."
    if any(row.streaming for row in data.datasets):
        yield from _training_streams(config)


def _training_streams(config: Config) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    if 0 < data.val_set_size < 1:
        yield "val_set_size: a share of a stream is not known. Give a number of rows, which are its first ones."
    elif data.val_set_size and len(data.datasets) > 1:
        yield "val_set_size: takes the first rows of one stream, and there are several. List 'test_datasets'."
    if data.curriculum_column:
        yield "curriculum_column: a stream cannot be sorted. Sort its files, and set 'curriculum_sampling: true'."
    if data.shard_count:
        yield "dataset_shard_num: a stream cannot be cut into shards. Leave it out, or 'streaming'."
    colocated = config.method.online and rollout.use_vllm and rollout.vllm_mode == "colocate"
    if colocated and not (data.max_prompt_length or rollout.colocate_length):
        yield "max_prompt_length: missing. The longest prompt of a stream is not known before it is read."


def lengths(config: Config) -> Iterator[str]:
    """Check that a run on streams has an end: a number of steps, or of rows that is known before they are read."""
    streamed = [row for row in config.data.datasets if row.streaming and not config.optim.max_steps]
    changed = any(not keeps_count(config.method, row) for row in streamed)
    if changed or any(_is_uncounted(row) for row in without_end(config)):
        yield UNKNOWN_LENGTH


def without_end(config: Config) -> list[DatasetSpec]:
    """Return the streams that no key ends; their files may still say how many rows they have."""
    return [row for row in config.data.datasets if row.streaming and not (config.optim.max_steps or row.max_samples)]


def keeps_count(method: Method, row: DatasetSpec) -> bool:
    """Return whether a row of an entry is one row to train on: neither users' code nor a format drops or splits it."""
    name, plain = row.type, FORMAT_NAMES[method.formats()]
    transformed = isinstance(name, str) and (name not in plain or name in SPLITTING)
    by_method = name is None and type(method).read_row is not None
    left_out = isinstance(name, UserFormat) and name.leaving_out()
    split = method.data == "labelled"  # where a pair is two rows
    return not (row.filter or transformed or left_out or by_method or split)


def _is_uncounted(row: DatasetSpec) -> bool:
    """Return whether a stream's files, by their names alone, do not say how many rows they have."""
    files = [row.data_files] if isinstance(row.data_files, str) else row.data_files or []
    if row.ds_type is not None:
        return row.ds_type != COUNTED
    return "://" in (row.path or "") or any(_suffix(name) in UNCOUNTED for name in (row.path or "", *files))


def _suffix(name: str) -> str:
    """Return the part of a file's name that says its type: `.jsonl` of `rows.jsonl.gz`."""
    path = Path(name)
    return (Path(path.stem) if path.suffix.lower() in PACKED else path).suffix.lower()


def weights(config: Config) -> Iterator[str]:
    """Check the weights of datasets and when they change."""
    data, schedule = config.data, config.data.mix_schedule
    interleaved, given = data.mix != "concatenate", [row.weight for row in data.datasets]
    weighted = next((number for number, weight in enumerate(given) if weight is not None), None)
    if weighted is not None and not interleaved:
        yield f"datasets[{weighted}].weight: no effect on datasets that are concatenated. Set 'mix: interleave_under'."
    elif weighted is not None and None in given:
        yield f"datasets[{given.index(None)}].weight: missing. Give all datasets a weight, or none."
    if schedule and not interleaved:
        yield "mix_schedule: no effect on datasets that are concatenated. Set 'mix: interleave_over'."
    if schedule and weighted is not None:
        yield "mix_schedule: cannot be used with the weights of datasets. Keep one."
    if schedule and not config.optim.max_steps:
        yield "mix_schedule: needs 'max_steps': an epoch of changing weights has no length."
    steps = [entry.step for entry in schedule]
    if steps != sorted(set(steps)) or (steps and steps[0]):
        yield "mix_schedule: steps begin at 0 and rise."
    for number, entry in enumerate(schedule):
        if len(entry.weights) != len(given):
            problem = f"{counted(len(entry.weights), 'weight')} for {counted(len(given), 'dataset')}"
            yield f"mix_schedule[{number}].weights: {problem}. Give one for each."
        elif min(entry.weights) < 0 or not any(entry.weights):
            yield f"mix_schedule[{number}].weights: numbers from 0, and one above it."


def feeds(config: Config) -> Iterator[str]:
    """Check what needs rows that can be looked up again."""
    data, method, rollout = config.data, config.method, config.rollout
    interleaved = data.mix != "concatenate"
    if not interleaved and not any(row.streaming for row in data.datasets):
        return
    if interleaved and method.precomputes_reference:
        yield f"precompute_ref_log_probs: not with {FED}. Leave it out."
    if method.strided:
        yield f"ebft.mode: strided reads documents in passes, not {FED}. Leave out 'mix' and 'streaming'."
    if method.online and rollout.replay_size:
        yield f"trl.replay_buffer_size: not with {FED}, whose earlier rows are gone. Leave it out."
    if method.online and rollout.reroll_start < 1:
        yield f"trl.reroll_start_fraction: not with {FED}, whose earlier rows are gone. Leave it out."
