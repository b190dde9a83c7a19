"""ORPO: Odds Ratio Preference Optimization (arXiv:2403.07691), reference free."""

from typing import ClassVar

from upweight.lazy_imports import F, Tensor, torch
from upweight.methods.base import Method, is_chosen, pair_counts, pair_metrics, required, sequence_sum
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs


class ORPO(Method):
    """Likelihood of the chosen sequence, plus the odds of the chosen over the rejected completion."""

    name: ClassVar[str] = "orpo"
    data: ClassVar = "pairs"
    balances_routers: ClassVar[bool] = False  # as in TRL's experimental trainer
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T", "mean_logit_T"})

    alpha: float = setting("orpo_alpha", 0.1, "Weight of the odds-ratio term.", also=("rl_beta", "trl.beta"), ge=0)
    likelihood_of_prompt: bool = setting(
        "orpo_nll_on_prompt", True, "Whether the likelihood term covers the prompt too, not the chosen answer alone."
    )

    @property
    def scores_prompt(self) -> bool:
        return self.likelihood_of_prompt

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return pair_counts(batch, likelihood=True)

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T, pair_P2 = required(out.logps_T), required(batch.pair_P2)
        chosen_T = is_chosen(batch)
        answer_T = torch.ones_like(logps_T) if batch.prompt_T is None else (~batch.prompt_T).to(logps_T.dtype)
        mean_S = sequence_sum(logps_T * answer_T, batch) / sequence_sum(answer_T, batch).clamp(min=1)
        chosen_P, rejected_P = mean_S[pair_P2].unbind(1)
        log_odds_P = (chosen_P - log_one_minus_exp(chosen_P)) - (rejected_P - log_one_minus_exp(rejected_P))
        metrics = {
            "nll_loss": Mean.over(-logps_T, chosen_T),
            "log_odds_ratio": Mean.of(F.logsigmoid(log_odds_P)),
            "log_odds_chosen": Mean.of(log_odds_P),
        }
        metrics |= pair_metrics(self.alpha * chosen_P, self.alpha * rejected_P, out, batch)
        sums = {"pairs": -self.alpha * F.logsigmoid(log_odds_P).sum(), "tokens": -(logps_T * chosen_T).sum()}
        return Loss(sums, metrics)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, finite up to x = 0."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-6)))
