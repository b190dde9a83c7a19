"""IPO: Identity Preference Optimization (arXiv:2310.12036), on log-ratios averaged over tokens."""

from typing import ClassVar

from torch import Tensor

from upweight.methods.base import Method, pair_metrics, pair_token_metrics, required, scalar, sequence_mean
from upweight.settings import setting
from upweight.types import Batch, Loss, Outputs


class IPO(Method):
    """Regression of the pair's margin to a fixed target."""

    name: ClassVar[str] = "ipo"
    data: ClassVar = "pairs"
    learning_rate: ClassVar[float] = 1e-6
    lora_learning_rate: ClassVar[float | None] = 5e-6

    beta: float = setting(
        "rl_beta", 0.1, "Pull towards the reference model: the target margin is 1 / (2 beta).", also=("trl.beta",), gt=0
    )
    precompute_ref_log_probs: bool = setting(
        "precompute_ref_log_probs", False, "Compute the reference's log-probs once, before training."
    )

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def precomputes_reference(self) -> bool:
        return self.precompute_ref_log_probs

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"entropy_T", "mean_logit_T", "is_top_T"})

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return {"pairs": scalar(len(required(batch.pair_P2)), batch)}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        ratio_S = sequence_mean(required(out.logps_T) - required(out.ref_logps_T), batch)
        chosen_P, rejected_P = ratio_S[required(batch.pair_P2)].unbind(1)
        loss_P = (chosen_P - rejected_P - 1 / (2 * self.beta)) ** 2
        metrics = pair_metrics(self.beta * chosen_P, self.beta * rejected_P) | pair_token_metrics(out, batch)
        return Loss({"pairs": loss_P.sum()}, metrics)
