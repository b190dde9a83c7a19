"""Users' losses and advantages in a policy gradient: their keys, and what takes the place of our losses."""

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import required, sequence_sum
from upweight.methods.users.cut import warn_if_cut_matters
from upweight.methods.users.function import Call
from upweight.methods.users.terms import Padded, checked_term, policy_values, require_finite, token_metrics
from upweight.settings import Section, keys_of
from upweight.types import Batch, Metric, Outputs

LOSS, ESTIMATOR = "trl.loss_type", "trl.advantage_estimator"
# What users' advantages can ask for; `rollout/user_advantages.py` has the values.
ADVANTAGES = ("rewards", "rewards_by_function", "groups", "lengths", "finished", "extras", "columns", "log_ratio",
              "rewards_to_go")  # fmt: skip
# Settings that only our losses read, and the argument by which a user's loss takes care of them.
OF_OUR_LOSSES = {
    **{name: name for name in ("epsilon", "epsilon_high", "delta", "importance_sampling_level")},
    **{name: name for name in ("off_policy_mask_threshold", "sapo_temperature_pos", "sapo_temperature_neg")},
    **{name: name for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")},
    **{f"sampler_correction{name}": "correction" for name in ("", "_mode", "_cap", "_floor")},
}


def refuse_unread(settings: Section, call: Call) -> None:
    """Raise for settings that differ from their default and that neither we nor the user's loss read."""
    for key in keys_of(type(settings)):
        asked = OF_OUR_LOSSES.get(key.name)
        if asked is not None and asked not in call.asks and getattr(settings, key.name) != key.field.default:
            raise ValueError(f"{key.path}: no effect, since '{call.function.name}' does not ask for '{asked}'")


def policy_term(  # noqa: PLR0917
    call: Call, settings: Section, out: Outputs, batch: Batch, sampled_S: Tensor, old_T: Tensor, correction_T: Tensor
) -> tuple[Tensor, bool, dict[str, Metric]]:
    """Return the user's term at each token, whether it is of sequences, and its metrics."""
    pad, sampled_T = Padded(batch), sampled_S[batch.sequence_T]
    advantage_T = required(batch.advantage_S)[batch.sequence_T] if batch.advantage_T is None else batch.advantage_T
    advantage_T = torch.where(sampled_T, advantage_T, 0.0)
    values = policy_values(
        pad, out, batch, old_T=old_T, correction_T=correction_T, advantage_T=advantage_T, mask_T=sampled_T
    )
    term, metrics = checked_term(call, call(values, settings), out, tokens=pad.shape, sequences=pad.shape[:1])
    kept = sequence_sum(sampled_T.long(), batch) > 0 if term.ndim == 1 else values["mask"]()
    require_finite(call, term, kept)
    warn_if_cut_matters(call, values, settings, term, kept)
    by_token = term[:, None].expand(pad.shape) if term.ndim == 1 else term
    loss_T = torch.where(sampled_T, pad.flat(by_token), 0.0)
    return loss_T, term.ndim == 1, token_metrics(metrics, pad, sampled_T, sampled_S)
