"""SimPO: Simple Preference Optimization (arXiv:2405.14734) with CPO's likelihood term, reference free."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from upweight.methods.base import (
    Method,
    given,
    is_chosen,
    pair_metrics,
    pair_token_metrics,
    scalar,
    sequence_mean,
)
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs


class SimPO(Method):
    """Margin between length-averaged log-probs, plus the chosen completion's likelihood."""

    name: ClassVar[str] = "simpo"
    data: ClassVar = "pairs"
    learning_rate: ClassVar[float] = 1e-6
    lora_learning_rate: ClassVar[float | None] = 5e-6

    beta: float = setting("rl_beta", 0.1, "Scale of the length-averaged log-probs.", also=("trl.beta",), gt=0)
    nll_weight: float = setting(
        "cpo_alpha", 1.0, "Weight of the chosen completion's likelihood; 0 is SimPO as published.", ge=0
    )
    gamma: float = setting("simpo_gamma", 0.5, "Margin by which the chosen completion should win.", ge=0)
    label_smoothing: float = setting(
        "cpo_label_smoothing", 0.0, "Assumed share of pairs whose two sides are swapped.", ge=0, lt=0.5
    )

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"entropy_T", "mean_logit_T"})

    def count(self, batch: Batch) -> dict[str, Tensor]:
        chosen_T = is_chosen(batch)[batch.sequence_T]
        return {"pairs": scalar(len(given(batch.pair_P2)), batch), "tokens": chosen_T.sum().float()}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T = given(out.logps_T)
        chosen_T = is_chosen(batch)[batch.sequence_T]
        chosen_P, rejected_P = (self.beta * sequence_mean(logps_T, batch))[given(batch.pair_P2)].unbind(1)
        margin_P = chosen_P - rejected_P - self.gamma
        smooth = self.label_smoothing
        loss_P = -(1 - smooth) * F.logsigmoid(margin_P) - smooth * F.logsigmoid(-margin_P)
        metrics = pair_metrics(chosen_P, rejected_P) | pair_token_metrics(out, batch)
        metrics["nll_loss"] = Mean.over(-logps_T, chosen_T)
        return Loss({"pairs": loss_P.sum(), "tokens": -self.nll_weight * (logps_T * chosen_T).sum()}, metrics)
