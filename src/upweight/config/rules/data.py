"""Rules about data: sources, shards, evaluation splits, formats and chat templates."""

from collections.abc import Iterator

from upweight.config.config import Config, how_to_choose
from upweight.config.peers import FORMAT_NAMES
from upweight.config.sections.data import FALLBACK_PREFIX, KNOWN_TEMPLATES, DataSection, DatasetSpec, UserFormat
from upweight.errors import did_you_mean
from upweight.methods import METHODS


def sources(config: Config) -> Iterator[str]:
    """Check data sources, shards, the evaluation split and chat templates."""
    section = config.data
    if section.val_set_size > 1 and section.val_set_size != int(section.val_set_size):
        yield f"val_set_size: a share below 1, or a whole number of rows, not {section.val_set_size:g}."
    if section.shard_count and section.shard_index >= section.shard_count:
        yield f"dataset_shard_idx: must be below dataset_shard_num ({section.shard_count})."
    yield from _template("", section)
    for key, row in entries(config):
        if row.path is None and row.data_files is None:
            yield f"{key}: names no data. Set 'path' or 'data_files'."
        if row.shards and row.shards_idx >= row.shards:
            yield f"{key}.shards_idx: must be below shards ({row.shards})."
        yield from _template(f"{key}.", row)


def streams(config: Config) -> Iterator[str]:
    """Check what a stream, which is read once and in order, cannot do."""
    data, method = config.data, config.method
    streamed = [(key, row) for key, row in entries(config) if row.streaming]
    if any(row.streaming for row in data.datasets):
        if 0 < data.val_set_size < 1:
            yield "val_set_size: a share of a stream is not known. Give a number of rows, which are its first ones."
        elif data.val_set_size and len(data.datasets) > 1:
            yield "val_set_size: takes the first rows of one stream, and there are several. List 'test_datasets'."
        if data.curriculum_column:
            yield "curriculum_column: the rows of a stream cannot be sorted. Sort its files, with 'curriculum_sampling'."
        if data.shard_count:
            yield "dataset_shard_num: a stream cannot be cut into shards. Leave it out, or 'streaming'."
        if config.rollout.vllm_mode == "colocate" and config.rollout.use_vllm and method.online:
            if not (data.max_prompt_length or config.rollout.colocate_length):
                yield "max_prompt_length: missing. The longest prompt of a stream is not known before it is read."
    if streamed and data.deduplicate:
        yield "dataset_exact_deduplication: would have to remember all rows of a stream. Remove repeated rows before."
    if streamed and method.precomputes_reference:
        problem = "is not supported with IterableDataset or 'streaming', whose rows are read once, while training"
        yield f"precompute_ref_log_probs: {problem}. Leave it out."
    for key, row in streamed:
        if row.shards:
            yield f"{key}.shards: a stream cannot be cut into shards. Leave it out, or 'streaming'."
        if row.split and "[" in row.split:
            yield f"{key}.split: a stream has no slices. 'max_samples' takes its first rows."


def mixtures(config: Config) -> Iterator[str]:
    """Check how datasets are mixed."""
    data, schedule = config.data, config.data.mix_schedule
    interleaved, weights = data.mix != "concatenate", [row.weight for row in data.datasets]
    weighted = next((number for number, weight in enumerate(weights) if weight is not None), None)
    if weighted is not None and not interleaved:
        yield f"datasets[{weighted}].weight: no effect on datasets that are concatenated. Set 'mix: interleave_under'."
    elif weighted is not None and None in weights:
        yield f"datasets[{weights.index(None)}].weight: missing. Give all datasets a weight, or none."
    if schedule and not interleaved:
        yield "mix_schedule: no effect on datasets that are concatenated. Set 'mix: interleave_over'."
    if schedule and weighted is not None:
        yield "mix_schedule: cannot be used with the weights of datasets. Keep one."
    if schedule and not config.optim.max_steps:
        yield "mix_schedule: needs 'max_steps': an epoch of changing weights has no length."
    if schedule and (
        [entry.step for entry in schedule] != sorted({entry.step for entry in schedule}) or schedule[0].step
    ):
        yield "mix_schedule: steps begin at 0 and rise."
    for number, entry in enumerate(schedule):
        if len(entry.weights) != len(data.datasets):
            count = f"{len(entry.weights)} weights for {len(data.datasets)} datasets"
            yield f"mix_schedule[{number}].weights: {count}. Give one for each."
        elif min(entry.weights) < 0 or not any(entry.weights):
            yield f"mix_schedule[{number}].weights: numbers from 0, of which one is above it."
    if not interleaved and not any(row.streaming for row in data.datasets):
        return
    what = "streams or interleaved datasets"
    if interleaved and config.method.precomputes_reference:
        yield f"precompute_ref_log_probs: not with {what}. Leave it out."
    if config.method.strided:
        yield f"ebft.mode: strided reads documents in passes, not {what}. Leave out 'mix' and 'streaming'."
    if config.method.online and config.rollout.replay_size:
        yield f"trl.replay_buffer_size: not with {what}, whose earlier rows are gone. Leave it out."
    if config.method.online and config.rollout.reroll_start < 1:
        yield f"trl.reroll_start_fraction: not with {what}, whose earlier rows are gone. Leave it out."


def entries(config: Config) -> Iterator[tuple[str, DatasetSpec]]:
    """Yield the YAML path and the entry of every training and evaluation dataset."""
    for key, rows in (("datasets", config.data.datasets), ("test_datasets", config.data.test_datasets)):
        for number, row in enumerate(rows):
            yield f"{key}[{number}]", row


def _template(key: str, section: DataSection | DatasetSpec) -> Iterator[str]:
    chosen = "tokenizer_default" if section.chat_template is None else section.chat_template
    plain = chosen.removeprefix(FALLBACK_PREFIX)
    if plain == "jinja" and not section.chat_template_jinja:
        yield f"{key}chat_template_jinja: missing. 'chat_template: jinja' needs the template's text or file."
    if plain not in KNOWN_TEMPLATES:
        near = did_you_mean(plain, KNOWN_TEMPLATES, 0.75)
        yield f"{key}chat_template: there is no '{plain}'.{near} Use 'tokenizer_default', or 'jinja' for yours."


def formats_are_known(config: Config) -> Iterator[str]:
    """Check the `type` of each entry, unless it names a user's function."""
    name, names = how_to_choose(config.method.name), FORMAT_NAMES[config.method.formats()]
    for key, row in entries(config):
        if isinstance(row.type, UserFormat) and "user_defined" not in names:
            yield f"{key}.type: a mapping of columns does not serve {name}. Name a format."
        if not isinstance(row.type, str) or row.type in names:
            continue
        if others := [how_to_choose(n) for n, method in METHODS.items() if row.type in FORMAT_NAMES[method.formats()]]:
            problem = f"'{row.type}' is for {', '.join(others)}, not for {name}."
            yield f"{key}.type: {problem} Known here: {', '.join(names)}."
        elif "." not in row.type:
            problem = f"there is no format '{row.type}' here.{did_you_mean(row.type, names)}"
            yield f"{key}.type: {problem} Known: {', '.join(names)}. Name your function as file.function."
