"""The check passes what is right, ours and users', and says in words what is wrong with the rest."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from upweight.doctor.method_check.checks import check
from upweight.doctor.method_check.targets import methods_of
from upweight.errors import UserError
from upweight.methods import DPO, GDPO, GRPO, IPO, KTO, ORM, ORPO, PRM, RLOO, SFT, SimPO
from upweight.methods.base import Method, pair_counts, required, sequence_sum
from upweight.types import Loss, Mean

OURS = {
    "grpo": GRPO(beta=0.1),
    "cispo": GRPO(loss_type="cispo"),
    "top entropy": GRPO(top_entropy_quantile=0.4, entropy_coef=0.1),
    "kto": KTO(),
    "prm": PRM(),
    "orm": ORM(),
    **{f"grpo {name}": GRPO(loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "sapo", "luspo", "vespo")},
    **{f"dpo {name}": DPO(loss_type=name) for name in ("sigmoid", "ipo", "aot", "sft")},
    **{method.name: method for method in (GDPO(), RLOO(), IPO(), ORPO(), SimPO(), SFT())},
}


def names(findings):
    """The names of what failed."""
    return [one.name for one in findings if one.problem is not None]


FAST = ("grpo", "cispo", "kto", "prm", "dpo sigmoid")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in OURS])
def test_our_methods_pass(name):
    assert names(check(OURS[name])) == []


def kimi(log_ratio, mask, sequence_advantages, tau: float = 0.1):
    return (sequence_advantages - tau * (log_ratio * mask).sum(1)) ** 2


def gpg(logps, advantages):
    return -advantages * logps


def chi(chosen_log_ratio, rejected_log_ratio, beta):
    link = lambda x: x.clamp(-20, 20).exp() + x  # noqa: E731
    return -F.logsigmoid((beta * (link(chosen_log_ratio) - link(rejected_log_ratio))).clamp(-2, 2))


def bounded(log_ratio, desirable, beta):
    return torch.where(desirable, -1.0, 1.0) * torch.tanh(beta * log_ratio)


def pass_at_one(rewards, groups):
    return rewards


def in_rows(rewards, num_generations):
    grouped = rewards.view(-1, num_generations).nan_to_num(0.0)
    return (grouped - grouped.mean(1, keepdim=True)).view(-1)


RIGHT = {
    "kimi": GRPO(loss_type=kimi),
    "gpg": GRPO(loss_type=gpg),
    "chi": DPO(loss_type=["sigmoid", chi]),
    "bounded": KTO(loss_type=bounded),
    "advantages": GRPO(advantage_estimator=pass_at_one),
    "advantages in rows": GRPO(advantage_estimator=in_rows),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_methods_of_users_pass(name):
    assert names(check(RIGHT[name])) == []


def by_tokens_of_the_batch(ratio, advantages, mask):
    return -ratio * advantages / mask.sum()


def by_batch_mean(log_ratio, sequence_advantages, mask):
    return -(log_ratio * mask).sum(1) * (sequence_advantages - sequence_advantages.mean())


def by_width(ratio, advantages):
    return -(ratio * advantages).mean(1)


def without_mask(ratio, lengths):
    return ratio.sum(1) / lengths


def difference_without_mask(logps, old_logps, sequence_advantages):
    return -(logps - old_logps).sum(1) * sequence_advantages


def reading(logps, advantages):
    return -logps * advantages if advantages.abs().max() > 0 else logps


def hidden(logps, advantages):
    with torch.no_grad():
        gate = logps.exp()
    return -logps * advantages * gate


def indexing(logps, mask):
    return torch.zeros_like(logps).masked_scatter(mask, logps[mask])


def nothing(logps, sequence_advantages):
    return (logps * 0).sum(1)


def by_place(rewards):
    return rewards - rewards[0]


def by_a_size_of_its_own(rewards):
    grouped = rewards.view(-1, 4)
    return (grouped - grouped.nanmean(1, keepdim=True)).flatten()


def by_spread(rewards, groups):
    sizes = torch.zeros(int(groups.max()) + 1).index_add(0, groups, torch.ones_like(rewards))[groups]
    spread = torch.stack([rewards[groups == group].std() for group in groups])
    return rewards / spread / sizes


def by_number(logps, advantages):
    return -logps * advantages * torch.arange(len(logps), device=logps.device)[:, None]


def noisy(logps, advantages):
    return -logps * advantages * (1 + 0.1 * torch.rand_like(logps))


def by_chance(rewards):
    return rewards * torch.rand_like(rewards)


def infinite_where_long(log_ratio, mask, lengths):
    return (log_ratio * mask).sum(1) / (lengths < 12)


WRONG = {
    infinite_where_long: ("runs", "returned NaN or infinity in 3 of 11 terms"),
    by_number: ("any order", "A sequence has no fixed place in a batch"),
    noisy: ("runs", "with the same step again. Draw no random numbers"),
    by_tokens_of_the_batch: ("any cut into micro-batches", "micro-batch. Return the terms themselves"),
    by_batch_mean: ("any cut into micro-batches", "a cut into"),
    by_width: ("masks", "divide by `lengths`, not by the width"),
    difference_without_mask: ("masks", "Multiply by `mask`"),
    without_mask: ("masks", "Multiply by `mask`"),
    reading: ("no waiting for the device", "float(): trl.loss_type: '"),
    hidden: ("gradients against finite differences", "no_grad"),
    indexing: ("no waiting for the device", "boolean indexing"),
    nothing: ("runs", "no gradient reaches"),
}


@pytest.mark.parametrize("loss", WRONG, ids=lambda loss: loss.__name__)
def test_wrong_losses_are_caught_in_words(loss):
    findings = check(GRPO(loss_type=loss))
    name, words = WRONG[loss]
    assert name in names(findings)
    assert any(words in (one.problem or "") for one in findings if one.name == name)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_a_size_of_its_own, "it does not fit 3 groups of 9 completions. Read which completions belong together"),
        (by_place, "another order"),
        (by_spread, "NaN or infinity"),
        (by_chance, "at the second call. Draw no random"),
    ],
)
def test_wrong_advantages_are_caught_in_words(function, words):
    findings = check(GRPO(advantage_estimator=function))
    assert names(findings) == ["advantages"]
    assert words in (findings[-1].problem or "")


def by_eight_others(rewards, groups):
    sizes = torch.bincount(groups[~rewards.isnan()])
    if int(sizes.min()) < 8:
        raise ValueError(f"eight completions are needed, and there are {int(sizes.min())}")
    return torch.stack([rewards[groups == group].nanmean() for group in groups])


def test_groups_are_as_large_as_the_settings_say():
    assert names(check(GRPO(advantage_estimator=by_eight_others, num_generations=16))) == []
    assert names(check(GRPO(advantage_estimator=by_eight_others, num_generations=8))) == ["advantages"]


class Divides(Method):
    """Divides by the pairs of a micro-batch."""

    name = "divides"
    data = "pairs"

    def count(self, batch):
        return pair_counts(batch)

    def loss(self, out, batch, prepared):
        chosen_P, rejected_P = sequence_sum(required(out.logps_T), batch)[required(batch.pair_P2)].unbind(1)
        return Loss({"pairs": -F.logsigmoid(chosen_P - rejected_P).mean()})


class CountsOtherwise(Divides):
    name = "counts"

    def count(self, batch):
        return {"tokens": Mean.of(required(batch.advantage_S)).weight / 2}


def test_wrong_methods_are_caught_in_words():
    assert {"any cut into micro-batches", "trees, rows and ranks of a model"} <= set(names(check(Divides())))
    (finding,) = check(CountsOtherwise())
    assert "count() has ['tokens'], and the loss is summed by ['pairs']" in (finding.problem or "")


def test_a_wrong_name_is_said_before_anything_runs():
    with pytest.raises(ValueError, match="asks for 'advantage'"):
        GRPO(loss_type=lambda logps, advantage: logps)
    assert issubclass(UserError, ValueError)


def test_the_example_of_the_page_passes():
    examples = Path(__file__).parents[3] / "examples" / "own_method"
    for method in methods_of("squared.py", {}, None, examples).values():
        assert names(check(method)) == []


def test_one_mistake_has_one_cause():
    by_name = {one.name: one.problem or "" for one in check(GRPO(loss_type=by_width))}
    assert "Padding is in it" in by_name["any cut into micro-batches"]
    assert "The cause is that of 'any cut" in by_name["trees, rows and ranks of a model"]
    assert not any("divided by, averaged" in problem for problem in by_name.values())
    by_name = {one.name: one.problem or "" for one in check(GRPO(loss_type=by_tokens_of_the_batch))}
    assert "divided by, averaged" in by_name["any cut into micro-batches"]


def test_a_detached_loss_is_told_the_names_of_its_kind():
    def detached(chosen_log_ratio, rejected_log_ratio):
        return (rejected_log_ratio - chosen_log_ratio).detach()

    (finding,) = check(DPO(loss_type=detached))
    assert "use 'chosen_log_ratio' or 'rejected_log_ratio' without .detach()" in (finding.problem or "")


def test_what_cannot_be_tried_is_said():
    def by_column(rewards, columns):
        return rewards - rewards.new_tensor(columns["baseline"])

    assert [one.untried for one in check(GRPO(advantage_estimator=by_column))][-1] == (
        "it reads columns, which only a rollout of yours has"
    )
    assert check(DPO())[-1].untried == "the method has no advantages of its own"
