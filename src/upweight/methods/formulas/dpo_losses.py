"""The losses of the DPO family: one loss for each pair from its log-probs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from upweight.lazy_imports import F, Tensor, torch

LossType = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

SMOOTHED: frozenset[str] = frozenset({"sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"})
DIVERGENT: frozenset[str] = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"})
LARGEST_EXPONENT = 80.0


@dataclass(frozen=True, eq=False)
class Pairs:
    """The inputs of the losses; `log_ratio` is policy minus reference log-prob, `score` its f-divergence form."""

    policy_P2: Tensor
    ref_P2: Tensor
    score_P2: Tensor
    length_P2: Tensor
    beta: float
    smoothing: float
    tau: float
    sorted: dict[str, Tensor]  # of the whole step, for the losses that compare distributions

    @property
    def log_ratio_P2(self) -> Tensor:
        return self.policy_P2 - self.ref_P2

    @property
    def margin_P(self) -> Tensor:
        return self.beta * (self.score_P2[:, 0] - self.score_P2[:, 1])

    @property
    def mean_margin_P(self) -> Tensor:
        mean_P2 = self.score_P2 / self.length_P2
        return mean_P2[:, 0] - mean_P2[:, 1]

    @property
    def rewards(self) -> tuple[Tensor, Tensor]:
        reward_P2 = self.beta * self.log_ratio_P2
        return reward_P2[:, 0], reward_P2[:, 1]


def divergence_score(log_ratio: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """Return the score of a log-ratio under an f-divergence (arXiv:2309.16240), up to a constant."""
    if divergence == "forward_kl":
        return 1 - torch.exp((-log_ratio).clamp(max=LARGEST_EXPONENT))
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if divergence == "alpha_divergence" and alpha != 1:
        return torch.expm1(((alpha - 1) * log_ratio).clamp(max=LARGEST_EXPONENT)) / (alpha - 1)
    return log_ratio


def smoothed_sigmoid(margin_P: Tensor, smoothing: float) -> Tensor:
    """Return the negative log-likelihood that the chosen side wins, if a fraction `smoothing` of labels is wrong."""
    return -(1 - smoothing) * F.logsigmoid(margin_P) - smoothing * F.logsigmoid(-margin_P)


def sigmoid(pairs: Pairs) -> Tensor:
    return smoothed_sigmoid(pairs.margin_P, pairs.smoothing)


def sigmoid_norm(pairs: Pairs) -> Tensor:
    return smoothed_sigmoid(pairs.beta * pairs.mean_margin_P, pairs.smoothing)


def hinge(pairs: Pairs) -> Tensor:
    return torch.relu(1 - pairs.margin_P)


def ipo(pairs: Pairs) -> Tensor:
    return (pairs.mean_margin_P - 1 / (2 * pairs.beta)) ** 2


def exo_pair(pairs: Pairs) -> Tensor:
    win_P, lose_P = F.logsigmoid(pairs.margin_P), F.logsigmoid(-pairs.margin_P)
    gain_P = win_P.exp() * (win_P - math.log1p(-pairs.smoothing))
    return gain_P + lose_P.exp() * (lose_P - math.log(pairs.smoothing))


def nca_pair(pairs: Pairs) -> Tensor:
    chosen_P, rejected_P = pairs.rewards
    return -F.logsigmoid(chosen_P) - 0.5 * F.logsigmoid(-chosen_P) - 0.5 * F.logsigmoid(-rejected_P)


def robust(pairs: Pairs) -> Tensor:
    noisy_P = -(1 - pairs.smoothing) * F.logsigmoid(pairs.margin_P) + pairs.smoothing * F.logsigmoid(-pairs.margin_P)
    return noisy_P / (1 - 2 * pairs.smoothing)


def bco_pair(pairs: Pairs) -> Tensor:
    chosen_P, rejected_P = pairs.rewards
    return -F.logsigmoid(chosen_P) - F.logsigmoid(-rejected_P)


def sppo_hard(pairs: Pairs) -> Tensor:
    chosen_P, rejected_P = pairs.log_ratio_P2.unbind(1)
    return (chosen_P - 0.5 / pairs.beta) ** 2 + (rejected_P + 0.5 / pairs.beta) ** 2


def apo_zero(pairs: Pairs) -> Tensor:
    chosen_P, rejected_P = pairs.rewards
    return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)


def apo_down(pairs: Pairs) -> Tensor:
    chosen_P, rejected_P = pairs.rewards
    return torch.sigmoid(chosen_P) + torch.sigmoid(rejected_P - chosen_P)


def discopop(pairs: Pairs) -> Tensor:
    gate_P = torch.sigmoid(pairs.margin_P / pairs.tau)
    # The second term is gate x exp(-margin), whose separate factors overflow.
    exponential_P = torch.exp(F.logsigmoid(pairs.margin_P / pairs.tau) - pairs.margin_P)
    return -(1 - gate_P) * F.logsigmoid(pairs.margin_P) + exponential_P


def step_values(loss_types: tuple[str, ...], policy_P2: Tensor, ref_P2: Tensor) -> dict[str, Tensor]:
    """Return the values that `aot` and `aot_unpaired` need sorted over the whole step."""
    values: dict[str, Tensor] = {}
    if "aot" in loss_types:
        values |= {"policy_margin": policy_P2[:, 0] - policy_P2[:, 1], "ref_margin": ref_P2[:, 0] - ref_P2[:, 1]}
    if "aot_unpaired" in loss_types:
        log_ratio_P2 = policy_P2 - ref_P2
        values |= {"chosen": log_ratio_P2[:, 0], "rejected": log_ratio_P2[:, 1]}
    return values


def at_same_rank(values_P: Tensor, sorted_values: Tensor, sorted_other: Tensor) -> Tensor:
    """Return the values of another sample of the same size that have the same ranks."""
    # Between neighbours, not at them: a value computed again with another rounding keeps its rank.
    borders = (sorted_values[1:] + sorted_values[:-1]) / 2
    return sorted_other[torch.searchsorted(borders, values_P.detach().contiguous())]


def aot(pairs: Pairs) -> Tensor:
    margin_P = pairs.policy_P2[:, 0] - pairs.policy_P2[:, 1]
    partner_P = at_same_rank(margin_P, pairs.sorted["policy_margin"], pairs.sorted["ref_margin"])
    return smoothed_sigmoid(pairs.beta * (margin_P - partner_P), pairs.smoothing)


def aot_unpaired(pairs: Pairs) -> Tensor:
    chosen_P, rejected_P = pairs.log_ratio_P2.unbind(1)
    below_P = at_same_rank(chosen_P, pairs.sorted["chosen"], pairs.sorted["rejected"])
    above_P = at_same_rank(rejected_P, pairs.sorted["rejected"], pairs.sorted["chosen"])
    loss_P = smoothed_sigmoid(pairs.beta * (chosen_P - below_P), pairs.smoothing)
    # Both sides of a rank see the same loss: it counts once, its gradient reaches both.
    mirror_P = smoothed_sigmoid(pairs.beta * (above_P - rejected_P), pairs.smoothing)
    return loss_P + mirror_P - mirror_P.detach()


# Each loss is the function of its name; sft is a sum over tokens, not over pairs.
PAIR_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {n: globals()[n] for n in get_args(LossType) if n != "sft"}
