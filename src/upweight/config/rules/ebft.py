"""Rules about the keys of EBFT, whose two modes read different keys."""

from collections.abc import Iterator

from upweight.config.config import Config
from upweight.methods import feature_matcher

# Keys of GRPO that EBFT cannot use, with the reason and remedy.
NOT_WITH_FEATURES = {
    "trl.reward_funcs": "ebft rewards the features of true answers; drop it, or use rl: grpo",
    "trl.reward_weights": "'ebft.alignment_coef' and 'ebft.diversity_coef' weigh the rewards",
    "trl.rollout_func": "ebft compares completions with the answers in the data; drop it, or use rl: grpo",
    "trl.streaming_partial_batch": "features are computed from whole rollouts by the model that trains; drop it",
    "trl.dynamic_sampling_max_rounds": "completions of a group get different rewards unless they are equal; drop it",
    "trl.reroll_start_fraction": "every completion earns a reward, so no prompt counts as failed; drop it",
    "nemo_gym_enabled": "ebft compares completions with the answers in the data; use rl: grpo",
}
NOT_WITH_BLOCKS = {
    "trl.use_vllm": "blocks are sampled in process, over the keys of their document; drop it",
    "trl.rollout_backend": "blocks are sampled in process, over the keys of their document; drop it",
    "trl.async_prefetch": "strided mode has no correction for samples of an older policy; drop it",
    "trl.replay_buffer_size": "strided mode has no correction for samples of an older policy; drop it",
}
# Keys of other blocks that strided mode reads.
READ_WITH_BLOCKS = {
    f"trl.{name}"
    for name in (
        "advantage_estimator", "scale_rewards", "generation_batch_size", "steps_per_generation", "log_completions",
        "num_completions_to_print", "num_generations_eval", "skip_zero_advantage_batches", "num_iterations",
    )
}  # fmt: skip
OF_BLOCKS = {
    f"ebft.{name}"
    for name in (
        "stride", "context_length", "generate_max_len", "n_samples_per_prompt", "temperature", "top_p",
        "min_completion_prefix",
    )
}  # fmt: skip
OF_ANSWERS = {"ebft.adaptive_max_tokens", "ebft.gt_length_multiplier"}


def block_is_there(config: Config) -> Iterator[str]:
    """Require the block `ebft` with `rl: ebft`."""
    if feature_matcher(config.method) and not any(path.startswith("ebft.") for path in config.set_keys):
        yield "ebft: missing. `rl: ebft` needs its block; `ebft: {mode: structured}` takes every default."


def keys_refused_by_ebft(config: Config) -> Iterator[str]:
    """Reject keys that EBFT, or its strided mode, cannot use."""
    if feature_matcher(config.method) is None:
        return
    strided = config.method.strided
    for path, reason in (NOT_WITH_FEATURES | (NOT_WITH_BLOCKS if strided else {})).items():
        value = config.set_keys.get(path)
        if value and (path != "trl.reroll_start_fraction" or value != 1):
            yield f"{path}: {reason}."
    if strided and config.rollout.num_iterations > 1:
        yield "trl.num_iterations: strided mode has no policy ratio for a second pass over samples; drop it."


def ebft_keys_without_effect(config: Config) -> Iterator[str]:
    """Warn about keys of the other mode, and about a diversity term that whitening makes useless."""
    given, method = config.set_keys, feature_matcher(config.method)
    if method is None:
        return
    known = {*READ_WITH_BLOCKS, *NOT_WITH_FEATURES, *NOT_WITH_BLOCKS}
    if not method.strided:
        mode, stray = "without", [path for path in given if path in OF_BLOCKS]
    else:
        mode, stray = "with", [path for path in given if path.startswith(("trl.", "vllm.")) and path not in known]
        stray += [path for path in given if path in OF_ANSWERS]
    if stray:
        yield f"{', '.join(stray)}: no effect {mode} 'ebft.mode: strided'"
    if method.use_whitening and given.get("ebft.diversity_coef"):
        yield (
            "ebft.diversity_coef: whitening by a few samples makes them orthogonal: the diversity term acts on "
            "samples that repeat each other only (docs/ebft.md)"
        )
