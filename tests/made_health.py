"""Recorded runs: healthy ones, and what makes each of them sick."""

import random

HEALTHY = {
    "loss": 1e-8, "grad_norm": 0.4, "reward": 0.3, "reward_std": 0.4, "group_reward_std": 0.3,
    "frac_reward_zero_std": 0.2, "entropy": 0.4,
    "sampling/entropy": 0.4, "kl": 0.05, "clip_ratio/region_mean": 0.02, "completions/clipped_ratio": 0.1,
    "completions/mean_length": 100.0, "completions/distinct_share": 1.0,
    "completions/empty_share": 0.0, "rewards/correct/mean": 0.2,
    "rewards/correct/std": 0.3, "rewards/my_format/mean": 0.4, "rewards/my_format/std": 0.5,
    "sampling/sampling_logp_difference/mean": 0.02, "sampling/importance_sampling_ratio/mean": 0.98,
    "ebft/alignment": 0.5, "ebft/diversity": 0.05, "ebft/cfm_loss": 0.8, "rollout/share_of_seconds": 0.6,
    "rollout/wait_seconds": 20.0, "rewards/correct/seconds": 0.1, "tokens_per_second": 900.0, "step_time": 2.0,
}  # fmt: skip
PAIRS = {
    "loss": 0.5, "grad_norm": 2.0, "rewards/margins": 0.3, "rewards/accuracies": 0.65, "rewards/chosen": 0.1,
    "rewards/rejected": -0.2, "tokens_per_second": 900.0,
}  # fmt: skip
DISTILLED = {"loss": 0.5, "grad_norm": 2.0, "distill/agreement": 0.7, "distill/teacher_gain": 0.3,
             "distill/forward_kl": 0.4, "distill/reverse_kl": 0.5}  # fmt: skip
ALL_ALIKE = {"reward": 0.35, "frac_reward_zero_std": 1.0, "reward_std": 0.0, "group_reward_std": 0.0,
             "grad_norm": 0.0}  # fmt: skip
ENDS = {"reward_min": 0.0, "reward_max": 1.0}

# name of a verdict, healthy values of that kind of run, what they are after step 20: numbers, or functions of the step
SICK = [
    ("solved", {**HEALTHY, **ENDS},
     {**ALL_ALIKE, "reward": 1.0, "sampling/entropy": 0.001, "completions/distinct_share": 0.1}),
    ("solved", {**HEALTHY, **ENDS},
     {"reward": 0.95, "reward_std": 0.2, "frac_reward_zero_std": 0.85}),
    ("no signal", HEALTHY, ALL_ALIKE),
    ("no signal so far", {**HEALTHY, "frac_reward_zero_std": lambda step: float(step < 19)}, {}),
    ("little signal", HEALTHY, {"frac_reward_zero_std": lambda step: 0.95 if step % 3 else 0.75}),
    ("empty answers", HEALTHY, {**ALL_ALIKE, "completions/empty_share": 0.9,
                                "completions/distinct_share": 0.15, "completions/mean_length": 2.0}),
    ("empty answers", {**HEALTHY, "completions/empty_share": 1.0, "sampling/entropy": 0.02}, {}),
    ("mode collapse", HEALTHY, {**ALL_ALIKE, "sampling/entropy": 0.001}),
    ("mode collapse", HEALTHY, {**ALL_ALIKE, "completions/distinct_share": 0.15}),
    ("mode collapse", HEALTHY,
     {**ALL_ALIKE, "completions/distinct_share": lambda step: 0.35 if step % 4 == 0 else 0.15}),
    ("mode collapse", {**HEALTHY, **ENDS}, {**ALL_ALIKE, "reward": 0.02, "sampling/entropy": 0.03}),
    ("mode collapse", {**HEALTHY, "reward": -0.5, "reward_min": -1.0, "reward_max": 1.0},  # one wrong answer
     {**ALL_ALIKE, "reward": 0.0, "sampling/entropy": 0.03, "completions/distinct_share": 0.125}),
    ("reward at zero", {**HEALTHY, "reward": 0.0, "reward_std": 0.0}, {**ALL_ALIKE, "reward": 0.0}),
    ("low entropy", HEALTHY, {"sampling/entropy": 0.03}),
    ("rewards draw together", HEALTHY, {"group_reward_std": 0.05}),
    ("rarely earned", {**HEALTHY, "rewards/correct/mean": 0.1}, {}),
    ("rarely earned", {**HEALTHY, "rewards/correct/mean": 0.01, "rewards/correct/std": 0.03}, {}),
    ("constant reward", HEALTHY, {"rewards/correct/std": 0.0}),
    ("format ignored", {**HEALTHY, "rewards/my_format/mean": 0.01}, {}),
    ("reward fails", HEALTHY, {"rewards/correct/failed": 3.0}),
    ("reward fails", HEALTHY, {"rewards/correct/failed_share": lambda step: 0.25 * (step % 3 == 0)}),
    ("flat reward", {**HEALTHY, "reward": lambda step: 0.3 + 0.05 * (-1) ** step}, {}),
    ("reward falls", HEALTHY, {"reward": 0.05}),
    ("reward collapses", {**HEALTHY, "completions/clipped_ratio": 0.3, "reward_std": 0.4},  # little to lose
     {"reward": 0.25, "reward_std": 0.1, "frac_reward_zero_std": 0.7, "completions/clipped_ratio": 0.98}),
    ("reward collapses", HEALTHY,  # as after steps that are too large, without a reference
     {**ALL_ALIKE, "reward": -0.1, "completions/clipped_ratio": 1.0, "sampling/entropy": 0.7,
      "rewards/correct/mean": 0.0, "rewards/correct/std": 0.0, "grad_norm": lambda step: 40.0 * (step % 3 == 0)}),
    ("far from the reference", HEALTHY, {"kl": lambda step: 0.8 + 0.2 * (-1) ** step}),
    ("kl explosion", HEALTHY, {"kl": 9.0}),
    ("entropy rises", HEALTHY, {"sampling/entropy": 3.0, "reward": 0.24}),
    ("high entropy", {**HEALTHY, "sampling/entropy": 0.7}, {"reward": 0.24}),
    ("gradients above 1", HEALTHY, {"grad_norm": 3.0, "reward": 0.24}),
    ("large gradients", HEALTHY, {"grad_norm": 40.0}),
    ("large gradients", PAIRS, {"grad_norm": 400.0}),
    ("no gradient", PAIRS, {"grad_norm": 0.0}),
    ("no gradient", HEALTHY, {"grad_norm": 0.0}),
    ("sampler disagrees", HEALTHY, {"sampling/sampling_logp_difference/mean": 3.0}),
    ("samples hardly count", HEALTHY, {"sampling/importance_sampling_ratio/mean": 0.01}),
    ("much is clipped", HEALTHY, {"clip_ratio/region_mean": 0.5}),
    ("length hacking", HEALTHY, {
        "completions/mean_length": lambda step: 100.0 + 2 * step, "reward": 0.6,
        "completions/clipped_ratio": lambda step: min(step / 100, 0.9),
    }),
    ("truncated", HEALTHY, {"completions/clipped_ratio": 0.97}),
    ("slow rewards", HEALTHY, {"rewards/correct/seconds": 30.0, "rollout/share_of_seconds": 0.95}),
    ("steps slow down", HEALTHY, {"tokens_per_second": 300.0, "step_time": 6.0}),
    ("steps slow down", PAIRS, {"tokens_per_second": lambda step: 900.0 / (1 + step / 40)}),
    ("slow sampling", HEALTHY, {"rollout/share_of_seconds": 0.95}),
    ("features not aligned", HEALTHY, {"ebft/alignment": 0.02}),
    ("features coincide", HEALTHY, {"ebft/diversity": 0.997}),
    ("features drift away", HEALTHY, {"ebft/cfm_loss": 1.9}),
    ("wrong way round", PAIRS, {"rewards/accuracies": 0.3, "rewards/margins": -0.5}),
    ("negative margins", PAIRS, {"rewards/accuracies": 0.5, "rewards/margins": -0.01}),
    ("margins run away", PAIRS, {"rewards/margins": 8e5, "rewards/accuracies": 1.0, "loss": 0.0, "grad_norm": 0.0}),
    ("nothing left to tell apart", PAIRS, {"rewards/accuracies": 1.0, "loss": 0.001}),
    ("loss rises", PAIRS, {"loss": 0.9}),
    ("loss explodes", {**PAIRS, "mean_token_accuracy": 0.5}, {"loss": 12.0, "mean_token_accuracy": 0.01}),
    ("teacher does not fit", DISTILLED, {"distill/agreement": 0.02}),
    ("teacher is hardly compared", DISTILLED, {"distill/aligned_share": 0.2}),
    ("nothing left to learn from the teacher", DISTILLED, {"distill/forward_kl": 1e-7, "distill/reverse_kl": -1e-7}),
    ("experts collapse", {**PAIRS, "router/max_load": 1.6}, {"router/max_load": 4.0}),
    ("experts collapse", {**HEALTHY, "router/max_load": 1.6}, {"router/max_load": 4.0}),
    ("experts unused", HEALTHY, {"router/unused_experts": 0.8}),
    ("experts unused", PAIRS, {"router/unused_experts": 0.8}),
    ("teacher is worse", DISTILLED, {"distill/teacher_gain": -0.4}),
]  # fmt: skip


def run_of(healthy, sick=None, *, every=1, steps=300, since=20):
    """The rows of a run that is healthy, but for what falls sick."""
    rows = []
    for step in range(every, steps + 1, every):
        values = {**healthy, **(sick if sick and step > since else {})}
        rows.append({"step": step, **{name: v(step) if callable(v) else v for name, v in values.items()}})
    return rows


def learning(step):
    """A reward that rises with noise."""
    return 0.3 + 0.5 * step / 300 + 0.2 * random.Random(step).uniform(-1, 1)
