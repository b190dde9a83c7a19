"""SimPO (arXiv:2405.14734) and CPO (arXiv:2401.08417): preferences with a likelihood term, reference free."""

from typing import ClassVar, Literal

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import Method, is_chosen, pair_counts, pair_metrics, required, sequence_mean, sequence_sum
from upweight.methods.formulas.dpo_losses import smoothed_sigmoid
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs


class SimPO(Method):
    """Margin between the log-probs of two completions, plus the chosen one's likelihood."""

    name: ClassVar[str] = "simpo"
    data: ClassVar = "pairs"
    balances_routers: ClassVar[bool] = False  # as in TRL's experimental trainer
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T", "mean_logit_T"})

    loss_type: Literal["simpo", "sigmoid", "hinge", "ipo"] = setting(
        "cpo_loss_type",
        "simpo",
        "Margin loss; simpo and ipo compare mean log-probs, sigmoid (CPO) and hinge their sums.",
    )
    beta: float = setting("rl_beta", 0.1, "Scale of the log-probs that are compared.", also=("trl.beta",), gt=0)
    nll_weight: float = setting("cpo_alpha", 1.0, "Weight of the likelihood term; 0 is SimPO as published.", ge=0)
    gamma: float = setting("simpo_gamma", 0.5, "Margin by which the chosen completion should win, for simpo.", ge=0)
    alpha: float = setting(
        "trl.alpha", 0.0, "Order of AlphaPO's reward (arXiv:2501.03884), (1 - p^-alpha) / alpha; 0 is the log-prob."
    )
    label_smoothing: float = setting(
        "cpo_label_smoothing", 0.0, "Assumed share of pairs whose chosen and rejected are swapped.", ge=0, lt=0.5
    )

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return pair_counts(batch, likelihood=True)

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T = required(out.logps_T)
        chosen_T = is_chosen(batch)
        value_of = sequence_mean if self.loss_type in ("simpo", "ipo") else sequence_sum
        value_S = value_of(logps_T, batch)
        if self.alpha:
            value_S = -torch.expm1(-self.alpha * value_S) / self.alpha
        chosen_P, rejected_P = (self.beta * value_S)[required(batch.pair_P2)].unbind(1)
        loss_P = self._of_margin(chosen_P - rejected_P)
        metrics = pair_metrics(chosen_P, rejected_P, out, batch)
        metrics["nll_loss"] = Mean.over(-logps_T, chosen_T)
        return Loss({"pairs": loss_P.sum(), "tokens": -self.nll_weight * (logps_T * chosen_T).sum()}, metrics)

    def _of_margin(self, margin_P: Tensor) -> Tensor:
        """Return the loss of each pair from the difference of its scaled log-probs."""
        if self.loss_type == "hinge":
            return torch.relu(1 - margin_P)
        if self.loss_type == "ipo":
            return ((margin_P - 0.5) / self.beta) ** 2
        margin_P = margin_P - self.gamma if self.loss_type == "simpo" else margin_P
        return smoothed_sigmoid(margin_P, self.label_smoothing)
