"""Rules across several keys, by subject; none of them looks at the machine."""

from collections.abc import Callable, Iterator

from upweight.config.config import Config
from upweight.config.rules import data, distill, ebft, feeds, keys, model, rollout, training

Rule = Callable[[Config], Iterator[str]]

# Rules do not check these: `upweight doctor` does, and `upweight train` before it loads anything.
NOT_VALIDATED = ("GPUs", "installed packages", "folders", "servers")

ERRORS: tuple[Rule, ...] = (
    keys.exclusive, ebft.keys_refused_by_ebft, model.loading, model.adapters, model.quantisation, model.references,
    distill.teachers, distill.comparisons, distill.alignments, data.sources,
    feeds.streams, feeds.weights, feeds.feeds,
    training.optimisation, training.user_callbacks, training.schedules, training.schedule_values,
    training.best_checkpoint, training.held_out_answers, training.shards, training.fsdp, training.deepspeed,
    training.paths,
    rollout.rewards_and_sampling, rollout.environments, rollout.dotted_paths, rollout.backends, rollout.vllm,
    rollout.routing_replay, rollout.sampler_quantization,
    rollout.adapters_for_vllm, rollout.weight_transfer,
)  # fmt: skip
WHOLE_CONFIG: tuple[Rule, ...] = (
    keys.required, data.formats_are_known, feeds.lengths, rollout.gym_is_complete, training.evaluation_is_there,
)  # fmt: skip
WARNINGS: tuple[Rule, ...] = (
    rollout.groups_fit_the_batch, rollout.without_effect, model.without_effect, training.without_effect,
    training.unusual_rate, training.single_answers, training.long_warmup, ebft.ebft_keys_without_effect,
    distill.without_effect,
)  # fmt: skip
WHOLE_CONFIG_WARNINGS: tuple[Rule, ...] = (rollout.without_use, keys.switched_off, training.without_evaluation)


def check(config: Config, *, fragment: bool = False) -> tuple[list[str], list[str]]:
    """Return errors and warnings, each with its YAML path; a fragment skips the rules for complete configs."""
    errors = ERRORS if fragment else (*ERRORS, *WHOLE_CONFIG)
    warnings = WARNINGS if fragment else (*WARNINGS, *WHOLE_CONFIG_WARNINGS)
    return [text for rule in errors for text in rule(config)], [text for rule in warnings for text in rule(config)]
