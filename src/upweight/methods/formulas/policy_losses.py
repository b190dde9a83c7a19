"""Token losses of the policy gradient, from log-probs and advantages."""

import math

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import sequence_sum
from upweight.types import Batch, Extreme, Mean, Metric


def clipped(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float, cap: float | None) -> Tensor:
    """PPO's pessimistic surrogate; `cap` also bounds the ratio of negative advantages (two-sided clip)."""
    free_T = ratio_T if cap is None else ratio_T.clamp(max=cap)
    return -torch.minimum(free_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T)


def cispo(logps_T: Tensor, ratio_T: Tensor, advantage_T: Tensor, high: float) -> Tensor:
    """CISPO (arXiv:2506.13585): a likelihood weighted by the capped ratio, which itself gets no gradient."""
    return -ratio_T.detach().clamp(max=1 + high) * advantage_T * logps_T


def sapo(ratio_T: Tensor, advantage_T: Tensor, positive: float, negative: float) -> Tensor:
    """SAPO: a soft gate around ratio 1 in place of the clip, with a temperature for each sign."""
    tau_T = torch.where(advantage_T > 0, positive, negative)
    return -4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantage_T


def vespo_weight(
    log_weight_S: Tensor, advantage_S: Tensor, positive: tuple[float, float], negative: tuple[float, float]
) -> Tensor:
    """VESPO: the weight of a sequence from its log importance weight; `positive` and `negative` are (k, lambda)."""
    log_weight_S = log_weight_S.detach().clamp(math.log(1e-8), 20.0)
    k_S = torch.where(advantage_S >= 0, positive[0], negative[0])
    decay_S = torch.where(advantage_S >= 0, positive[1], negative[1])
    return torch.exp(decay_S + k_S * log_weight_S - decay_S * log_weight_S.exp())


def reference_kl(logps_T: Tensor, ref_logps_T: Tensor) -> Tensor:
    """Return the low-variance estimate of the KL from the reference, which is never negative."""
    gap_T = ref_logps_T - logps_T
    return torch.expm1(gap_T) - gap_T


def sampler_gap(trainer_logps_T: Tensor, sampler_logps_T: Tensor) -> Tensor:
    """Return trainer log-probs minus sampler log-probs; 0 where the sampler reported none."""
    return (trainer_logps_T - sampler_logps_T).detach().nan_to_num(0.0)


def gap_metrics(trainer_logps_T: Tensor, batch: Batch, sampled_T: Tensor) -> dict[str, Metric]:
    """Return the mean distance of the trainer's log-probs from those at which tokens were drawn, where it is known."""
    if batch.drawn_logps_T is None:
        return {}
    gap_T = sampler_gap(trainer_logps_T, batch.drawn_logps_T)
    return {"sampling/logp_gap": Mean.over(gap_T.abs(), sampled_T)}


def sampler_correction(gap_T: Tensor, batch: Batch, mode: str, floor: float | None, cap: float) -> Tensor:
    """Return importance weights for tokens that the sampler drew from slightly different weights than the trainer's."""
    if mode.startswith("sequence"):
        gap_T = sequence_sum(gap_T, batch)[batch.sequence_T]
    weight_T = gap_T.exp()
    lowest = 0.0 if floor is None else floor
    if mode.endswith("truncate"):
        return weight_T.clamp(lowest, cap)
    return torch.where((weight_T >= lowest) & (weight_T <= cap), weight_T, 0.0)


def quantile(values: Tensor, share: float) -> Tensor:
    """Return the linear quantile of any number of values (torch.quantile stops at 16 million)."""
    position = share * (len(values) - 1)
    below = int(position)
    ordered = values.sort().values
    return torch.lerp(ordered[below], ordered[min(below + 1, len(values) - 1)], position - below)


def clip_metrics(
    ratio_T: Tensor, advantage_T: Tensor, sampled_T: Tensor, low: float, high: float, *, batch: Batch | None = None
) -> dict[str, Metric]:
    """Return the fractions of tokens whose gradient the clip removed; without a batch, values are of sequences."""
    below_T = (ratio_T < 1 - low) & (advantage_T < 0)
    above_T = (ratio_T > 1 + high) & (advantage_T > 0)

    def extreme(clipped_T: Tensor, sign: int) -> Extreme:
        """Return the extreme of the sequences' shares."""
        if batch is None:
            return Extreme.over(clipped_T, sampled_T, sign)
        scored_S = sequence_sum(sampled_T.float(), batch)
        return Extreme.over(sequence_sum(clipped_T.float(), batch) / scored_S.clamp(min=1), scored_S > 0, sign)

    return {
        "clip_ratio/low_mean": Mean.over(below_T, sampled_T),
        "clip_ratio/low_min": extreme(below_T, -1),
        "clip_ratio/high_mean": Mean.over(above_T, sampled_T),
        "clip_ratio/high_max": extreme(above_T, 1),
        "clip_ratio/region_mean": Mean.over(below_T | above_T, sampled_T),
    }
