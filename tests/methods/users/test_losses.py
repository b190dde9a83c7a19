"""A user's loss takes the place of ours: it gets what it asks for, and its terms are counted and averaged by us."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from made_batches import made_batch, made_outputs, metrics_of, tensor, total_loss
from upweight.errors import UserError
from upweight.methods import DPO, EBFT, GDPO, GRPO, KTO, SFT
from upweight.methods.users.terms import LABELLED, PAIRS, POLICY, TOKENS

LOGPS = [[-0.5, -1.2, -0.3], [-2.0], [-0.7, -0.1]]
OLD = [[-0.6, -1.0, -0.3], [-1.8], [-0.9, -0.2]]
REF = [[-0.4, -1.1, -0.5], [-2.2], [-0.6, -0.3]]


def step(**more):
    batch = made_batch([3, 1, 2], advantage_S=[0.5, -1.0, 0.0], old_logps_T=[v for row in OLD for v in row], **more)
    return made_outputs(LOGPS, REF, entropy_T=tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])), batch


def clipped(ratio, advantages, *, clip=0.2):
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def clipped_by_sequence(ratio, advantages, mask, lengths, clip: float = 0.2):
    return (clipped(ratio, advantages, clip=clip) * mask).sum(1) / lengths


def test_a_term_by_token_is_averaged_over_tokens_as_dapo_is():
    out, batch = step()
    assert total_loss(GRPO(loss_type=clipped), out, batch) == pytest.approx(total_loss(GRPO(), out, batch))
    wide = total_loss(GRPO(epsilon=10.0), out, batch)
    assert total_loss(GRPO(loss_type=clipped, method_args={"clip": 10.0}), out, batch) == pytest.approx(wide)


@pytest.mark.parametrize("share", [None, [1.0, 0.25, 0.75]])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_term_by_sequence_is_averaged_over_sequences_as_grpo_is(beta, share):
    out, batch = step(**({} if share is None else {"share_S": share}))
    ours, users = GRPO(loss_type="grpo", beta=beta), GRPO(loss_type=clipped_by_sequence, beta=beta)
    assert total_loss(users, out, batch) == pytest.approx(total_loss(ours, out, batch))


def test_every_name_has_its_shape():
    seen = {}

    def record(*, logps, old_logps, log_ratio, ratio, advantages, sequence_advantages, mask, lengths, entropy,
               ref_logps, sampler_logps, correction, versions, lag, max_completion_length):  # fmt: skip
        seen.update({} if seen else locals())  # later calls try a part of the batch
        return logps

    out, batch = step(sampler_logps_T=[-0.5, float("nan"), -0.3, -2.0, -0.7, -0.1], lag_T=[1.0, 1, 1, 2, 3, 3])
    total_loss(GRPO(loss_type=record), out, batch)
    assert set(POLICY) <= seen.keys()
    width = seen["mask"].shape[1]
    for name in set(POLICY) - {"sequence_advantages", "lengths"}:
        assert seen[name].shape == (3, width), name
    assert seen["mask"].sum(1).tolist() == seen["lengths"].tolist() == [3, 1, 2]
    assert seen["sequence_advantages"].tolist() == [0.5, -1.0, 0.0]
    assert seen["logps"][2, :3].tolist() == [-0.7, -0.1, 0.0]
    assert seen["ratio"][1, :2].tolist() == pytest.approx([torch.tensor(-0.2).exp().item(), 1.0])
    assert seen["sampler_logps"][0, :3].tolist() == [-0.5, -1.0, -0.3]
    assert seen["lag"][:, 0].tolist() == [1, 2, 3]
    assert seen["max_completion_length"] == 256


def test_what_a_loss_asks_for_decides_what_is_computed():
    def with_reference(logps, ref_logps, beta):
        return beta * (logps - ref_logps)

    assert not GRPO(loss_type=clipped).needs_reference
    assert GRPO(loss_type=with_reference).needs_reference
    assert not GRPO(loss_type=with_reference, beta=0.5).adds_kl
    assert GRPO(loss_type=clipped, beta=0.5).adds_kl
    assert not GRPO(loss_type=clipped).reads_versions
    assert GRPO(loss_type=lambda logps, lag: logps / (1 + lag)).reads_versions


def test_completions_without_an_advantage_are_trained_on_unless_the_loss_says_otherwise():
    def squared(log_ratio, mask, sequence_advantages):
        return (sequence_advantages - (log_ratio * mask).sum(1)) ** 2

    assert GRPO(loss_type=squared).zero_advantage_reasons == ["trl.loss_type"]
    clipped.skip_zero_advantage = True
    try:
        assert GRPO(loss_type=clipped).zero_advantage_reasons == []
    finally:
        del clipped.skip_zero_advantage


def test_metrics_of_a_loss_are_means_over_scored_tokens_or_sequences():
    def measured(logps, advantages, mask, sequence_advantages):
        return -advantages * logps, {"mine/ones": torch.ones_like(logps), "mine/adv": sequence_advantages}

    metrics = metrics_of(GRPO(loss_type=measured), *step())
    assert metrics["mine/ones"] == 1
    assert metrics["mine/adv"] == pytest.approx(-0.5 / 3)


def sigmoid(chosen_log_ratio, rejected_log_ratio, beta):
    return -F.logsigmoid(beta * (chosen_log_ratio - rejected_log_ratio))


def sigmoid_from_tokens(logps, ref_logps, mask, beta):
    ratio_P2 = ((logps - ref_logps) * mask).sum(2)
    return -F.logsigmoid(beta * (ratio_P2[:, 0] - ratio_P2[:, 1]))


def pairs():
    batch = made_batch([3, 1, 2, 0], pair_P2=[[0, 1], [3, 2]])
    return made_outputs([*LOGPS, []], [*REF, []]), batch


@pytest.mark.parametrize("loss", [sigmoid, sigmoid_from_tokens])
def test_a_loss_of_pairs_is_averaged_over_pairs_alone_or_among_ours(loss):
    out, batch = pairs()
    assert total_loss(DPO(loss_type=loss), out, batch) == pytest.approx(total_loss(DPO(), out, batch))
    mixed = DPO(loss_type=["hinge", loss], loss_weights=[0.5, 2.0])
    ours = DPO(loss_type=["hinge", "sigmoid"], loss_weights=[0.5, 2.0])
    assert total_loss(mixed, out, batch) == pytest.approx(total_loss(ours, out, batch))


def test_every_name_of_pairs_has_its_shape():
    seen = {}

    def record(*, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, chosen_log_ratio,
               rejected_log_ratio, logps, ref_logps, entropy, mask, lengths, beta):  # fmt: skip
        seen.update({} if seen else locals())  # later calls try a part of the batch
        return chosen_logps

    total_loss(DPO(loss_type=record), *pairs())
    assert set(PAIRS) <= seen.keys()
    assert {seen[name].shape for name in PAIRS[:6]} == {(2,)}
    assert {seen[name].shape for name in ("logps", "ref_logps", "entropy", "mask")} == {(2, 2, 6)}
    assert seen["lengths"].tolist() == [[3, 1], [1, 2]]  # a side without tokens counts 1, so that it can divide
    assert seen["beta"] == 0.1


def kto(log_ratio, desirable, kl, beta):
    return 1 - torch.sigmoid(beta * torch.where(desirable, log_ratio - kl, kl - log_ratio))


def apo(log_ratio, desirable, beta):
    return 1 - torch.sigmoid(beta * torch.where(desirable, log_ratio, -log_ratio))


@pytest.mark.parametrize(("users", "name"), [(kto, "kto"), (apo, "apo_zero_unpaired")])
def test_a_loss_of_labelled_completions_is_ours_with_weights_and_the_kl_only_where_it_is_asked_for(users, name):
    out = made_outputs([*LOGPS, [-0.2]], [*REF, [-1.2]])
    batch = made_batch([3, 1, 2, 1], label_S=[1, 0, 1, -1])
    ours = KTO(loss_type=name, undesirable_weight=0.5)
    method = KTO(loss_type=users, undesirable_weight=0.5)
    assert method.mismatched == ours.mismatched
    assert total_loss(method, out, batch) == pytest.approx(total_loss(ours, out, batch))
    assert set(LABELLED) >= set(method.calls["kto_loss_type"].asks) - {"beta"}


def test_a_loss_of_tokens_takes_the_place_of_the_likelihood():
    def nll(logps):
        return -logps

    def nll_by_sequence(logps, mask, lengths):
        return -(logps * mask).sum(1) / lengths

    out, batch = made_outputs(LOGPS), made_batch([3, 1, 2])
    assert total_loss(SFT(loss_type=nll), out, batch) == pytest.approx(total_loss(SFT(), out, batch))
    expected = (2.0 / 3 + 2.0 + 0.8 / 2) / 3
    assert total_loss(SFT(loss_type=nll_by_sequence), out, batch) == pytest.approx(expected)
    assert set(TOKENS) == {"logps", "entropy", "mask", "lengths"}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logps: logps.mean(), "returned one number. Return the terms before any average"),
        (lambda logps: logps[:, :1].sum(1)[:2], r"returned a tensor of shape \[2\]; wanted: \[3, 6\] for tokens"),
        (lambda logps: 3, "returned a int; a tensor is wanted"),
        (lambda logps: logps / 0 * 0, "returned NaN or infinity in 6 of 6 terms"),
        (lambda logps: (logps, {"a": 1.0}), "returned the metric 'a' as float"),
        (lambda logps: logps.detach(), "returned a term without a gradient"),
        (lambda logps: logps[99], r"failed: IndexError: .* \(test_losses.py, line \d+\)"),
    ],
)
def test_a_wrong_return_is_said_in_words(loss, message):
    out, batch = step()
    out.logps_T.requires_grad_()
    with pytest.raises(UserError, match=r"trl\.loss_type: '.*test_losses\.<lambda>' ") as error:
        total_loss(GRPO(loss_type=loss), out, batch)
    assert error.match(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": lambda logps, advantage: logps}, "asks for 'advantage', .* Did you mean 'advantages'?"),
        ({"loss_type": clipped, "method_args": {"clap": 1}}, "method_args.clap: .* Did you mean 'clip'?"),
        ({"method_args": {"clip": 1}}, "method_args: has no effect unless trl.loss_type or trl.advantage_estimator"),
        ({"loss_type": clipped, "epsilon": 0.3}, "trl.epsilon: no effect, since '.*test_losses.clipped' does not ask"),
        ({"loss_type": clipped, "sampler_correction": True}, "trl.vllm_importance_sampling_correction: no effect"),
        ({"loss_type": int}, "'int' is a class; name a function"),
        ({"loss_type": clipped, "advantage_estimator": clipped}, "asks for 'ratio', which is neither"),
    ],
)
def test_settings_that_do_not_fit_a_loss_are_named(settings, message):
    with pytest.raises(ValidationError, match=message):
        GRPO(**settings)


def test_functions_share_the_options():
    def center(rewards, groups, shift: float = 0.0):
        return rewards - shift

    method = GRPO(loss_type=clipped, advantage_estimator=center, method_args={"clip": 0.5, "shift": 2})
    assert method.calls["trl.loss_type"].options == {"clip": 0.5}
    assert method.advantage_function.options == {"shift": 2.0}


def test_a_loss_is_saved_as_its_path():
    method = GRPO(loss_type=clipped)
    assert method.model_dump(mode="json")["loss_type"] == f"{__file__}:clipped"
    assert pickle.loads(pickle.dumps(method.loss_type)) == f"{__file__}:clipped"
    assert GRPO(loss_type=f"{__file__}:clipped").calls["trl.loss_type"].function.name.endswith("test_losses.clipped")


def test_methods_that_compute_their_own_advantages_refuse_others():
    def center(rewards):
        return rewards

    with pytest.raises(ValidationError, match="has no place where rewards are normalised"):
        GDPO(advantage_estimator=center)
    with pytest.raises(ValidationError, match=r"choose ebft\.advantage_estimator"):
        EBFT(advantage_estimator=center)


def by_tokens(ratio, advantages, mask):
    return -ratio * advantages / mask.sum()


def by_pairs(chosen_log_ratio, rejected_log_ratio):
    return (rejected_log_ratio - chosen_log_ratio) / len(chosen_log_ratio)


def by_answers(log_ratio, desirable):
    return torch.where(desirable, -log_ratio, log_ratio) - log_ratio.mean()


def by_texts(logps, mask):
    return -(logps * mask).sum(1) / len(mask)


CUT = {
    "grpo": (GRPO(loss_type=by_tokens), GRPO(loss_type=clipped)),
    "dpo": (DPO(loss_type=by_pairs), DPO(loss_type=sigmoid)),
    "kto": (KTO(loss_type=by_answers), KTO(loss_type=apo)),
    "sft": (SFT(loss_type=by_texts), SFT(loss_type=lambda logps: -logps)),
}


@pytest.mark.parametrize("name", CUT)
def test_a_loss_that_depends_on_its_micro_batch_is_warned_of_once_as_a_run_begins(name, caplog):
    wrong, right = CUT[name]
    out, batch = pairs() if name == "dpo" else step(**({"label_S": [1, 0, 1]} if name == "kto" else {}))
    for _ in range(3):
        total_loss(wrong, out, batch)
    (line,) = [record.getMessage() for record in caplog.records if "fewer are in the micro-batch" in record.message]
    assert "by_" in line
    caplog.clear()
    total_loss(right, out, batch)
    assert caplog.records == []


def test_what_is_not_finite_is_counted_as_it_was_returned():
    def infinite(ratio, lengths):
        return ratio[:, 0] / (lengths < 3)

    with pytest.raises(UserError, match="in 1 of 3 terms"):
        total_loss(GRPO(loss_type=infinite), *step())
