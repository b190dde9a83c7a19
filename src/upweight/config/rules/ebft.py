"""Rules about the keys of EBFT, whose two modes read different keys."""

from collections.abc import Iterator

from upweight.config.config import Config
from upweight.config.rules.keys import matching
from upweight.methods import feature_matcher

# Keys of GRPO that EBFT cannot use, with the reason and remedy.
NOT_WITH_FEATURES = {
    "trl.reward_funcs": "ebft rewards the features of true answers; drop it, or use rl: grpo",
    "trl.reward_weights": "'ebft.alignment_coef' and 'ebft.diversity_coef' weigh the rewards",
    "trl.teacher_kl_coef": "ebft rewards the features of true answers; drop it, or use rl: grpo",
    "trl.rollout_func": "ebft compares completions with the answers in the data; drop it, or use rl: grpo",
    "trl.streaming_partial_batch": "features are computed from whole rollouts by the model that trains; drop it",
    "trl.dynamic_sampling_max_rounds": "completions of a group get different rewards unless they are equal; drop it",
    "trl.reroll_start_fraction": "every completion earns a reward, so no prompt counts as failed; drop it",
    "trl.routing_replay": "experts are recorded for completions of prompts, not for blocks; drop it, or use rl: grpo",
    "nemo_gym_enabled": "ebft compares completions with the answers in the data; use rl: grpo",
}
NOT_WITH_BLOCKS = {
    "trl.sampler_quantization": "strided mode has no correction for samples of other weights; drop it",
    "trl.use_vllm": "blocks are sampled in process, over the keys of their document; drop it",
    "trl.rollout_backend": "blocks are sampled in process, over the keys of their document; drop it",
    "trl.async_prefetch": "strided mode has no correction for samples of an older policy; drop it",
    "trl.replay_buffer_size": "strided mode has no correction for samples of an older policy; drop it",
}
# Keys that only one of the modes reads; `*` stands for any ending.
ONLY_STRIDED = (
    "ebft.stride ebft.context_length ebft.generate_max_len ebft.n_samples_per_prompt ebft.temperature ebft.top_p"
    " ebft.min_completion_prefix"
)
ONLY_STRUCTURED = (
    "ebft.adaptive_max_tokens ebft.gt_length_multiplier vllm.* trl.vllm_* trl.temperature trl.top_* trl.min_p"
    " trl.repetition_penalty trl.generation_kwargs trl.reward_num_workers trl.reward_timeout trl.prefetch_depth"
    " trl.max_staleness trl.streaming_min_groups trl.replay_recompute_logps trl.replay_max_age trl.reroll_max_groups"
    " trl.num_generations trl.max_*_length trl.mask_truncated_completions trl.beta rl_beta trl.loss_type trl.epsilon*"
    " trl.delta trl.importance_sampling_level trl.use_bias_correction_kl trl.off_policy_mask_threshold"
    " trl.entropy_coef trl.sapo_* trl.vespo_* trl.sync_ref_model trl.ref_model_*"
)


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
    method = feature_matcher(config.method)
    if method is None:
        return
    mode, unread = ("with", ONLY_STRUCTURED) if method.strided else ("without", ONLY_STRIDED)
    if stray := matching(config.set_keys, unread):
        yield f"{', '.join(stray)}: no effect {mode} 'ebft.mode: strided'"
    if method.use_whitening and config.set_keys.get("ebft.diversity_coef"):
        yield "ebft.diversity_coef: whitening makes samples orthogonal: it acts only on those that repeat each other"
