from math import exp, log

import pytest
import torch
from pydantic import ValidationError

from made_batches import flat, made_batch, made_outputs, metrics_of, sigma, total_loss
from upweight.methods import DPO

# One pair: the chosen completion gained 0.6 over the reference in three tokens, the rejected one lost 0.2 in one.
CHOSEN, REJECTED = 0.6, -0.2
B = 0.5
E = 0.1


def one_pair():
    batch = made_batch([3, 1], pair_P2=[[0, 1]])
    return made_outputs([[-1.0, -0.5, -0.4], [-2.0]], [[-1.2, -0.8, -0.5], [-1.8]]), batch


X = B * (CHOSEN - REJECTED)
BC, BR = B * CHOSEN, B * REJECTED
NORM = CHOSEN / 3 - REJECTED
BY_HAND = {
    "sigmoid": -log(sigma(X)),
    "hinge": 1 - X,
    "ipo": (NORM - 1 / (2 * B)) ** 2,
    "nca_pair": -log(sigma(BC)) - 0.5 * log(sigma(-BC)) - 0.5 * log(sigma(-BR)),
    "robust": -log(sigma(X)),
    "bco_pair": -log(sigma(BC)) - log(sigma(-BR)),
    "sppo_hard": (CHOSEN - 1) ** 2 + (REJECTED + 1) ** 2,
    "aot": -log(sigma(X)),
    "aot_unpaired": -log(sigma(X)),
    "apo_zero": 1 - sigma(BC) + sigma(BR),
    "apo_down": sigma(BC) + 1 - sigma(BC - BR),
    "discopop": (1 - sigma(X / 0.05)) * -log(sigma(X)) + sigma(X / 0.05) * exp(-X),
    "sft": (1.0 + 0.5 + 0.4) / 3,
    "sigmoid_norm": -log(sigma(B * NORM)),
}
SMOOTHED_BY_HAND = {
    "sigmoid": -(1 - E) * log(sigma(X)) - E * log(sigma(-X)),
    "sigmoid_norm": -(1 - E) * log(sigma(B * NORM)) - E * log(sigma(-B * NORM)),
    "exo_pair": sigma(X) * (log(sigma(X)) - log(1 - E)) + sigma(-X) * (log(sigma(-X)) - log(E)),
    "robust": (-(1 - E) * log(sigma(X)) + E * log(sigma(-X))) / (1 - 2 * E),
    "aot": -(1 - E) * log(sigma(X)) - E * log(sigma(-X)),
    "aot_unpaired": -(1 - E) * log(sigma(X)) - E * log(sigma(-X)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_of_one_pair(name):
    assert total_loss(DPO(loss_type=name, beta=B), *one_pair()) == pytest.approx(BY_HAND[name])


@pytest.mark.parametrize("name", SMOOTHED_BY_HAND)
def test_loss_of_one_pair_with_label_smoothing(name):
    method = DPO(loss_type=name, beta=B, label_smoothing=E)
    assert total_loss(method, *one_pair()) == pytest.approx(SMOOTHED_BY_HAND[name])


# Published behaviour of these losses where policy and reference agree (beta 0.1, smoothing 0.1, 0.001 for exo_pair).
AT_THE_REFERENCE = {
    "sigmoid": 0.69315, "hinge": 1.0, "ipo": 25.0, "robust": 0.69315, "bco_pair": 1.38629, "sppo_hard": 50.0,
    "nca_pair": 1.38629, "aot": 0.69315, "aot_unpaired": 0.69315, "apo_zero": 1.0, "apo_down": 1.0,
    "discopop": 0.84657, "sigmoid_norm": 0.69315, "exo_pair": 2.76123,
}  # fmt: skip


@pytest.mark.parametrize("name", AT_THE_REFERENCE)
def test_losses_start_where_they_are_known_to(name):
    logps = [[-1.0, -2.0], [-0.5], [-3.0], [-0.1, -0.2]]
    out, batch = made_outputs(logps, logps), made_batch([2, 1, 1, 2], pair_P2=[[0, 1], [2, 3]])
    smoothing = {"exo_pair": 0.001, "robust": 0.1, "aot": 0.1, "aot_unpaired": 0.1}.get(name, 0.0)
    method = DPO(loss_type=name, label_smoothing=smoothing)
    assert total_loss(method, out, batch) == pytest.approx(AT_THE_REFERENCE[name], abs=1e-5)


def two_pairs():
    batch = made_batch([1, 1, 1, 1], pair_P2=[[0, 1], [2, 3]])
    return made_outputs([[-1.0], [-1.5], [-2.0], [-1.0]], [[-1.0], [-3.0], [-2.5], [-2.6]]), batch


def test_discopop_is_finite_where_an_answer_became_much_less_likely():
    batch = made_batch([1, 1], pair_P2=[[0, 1]])
    out = made_outputs([[-10_000.0], [0.0]], [[0.0], [0.0]])
    assert total_loss(DPO(loss_type="discopop", beta=0.1), out, batch) == pytest.approx(1000.0)


def test_aot_compares_sorted_margins():
    # Policy margins 0.5, -1.0; reference margins 2.0, 0.1: sorted, -1.0 meets 0.1 and 0.5 meets 2.0.
    expected = (-log(sigma(B * -1.1)) - log(sigma(B * -1.5))) / 2
    assert total_loss(DPO(loss_type="aot", beta=B), *two_pairs()) == pytest.approx(expected)


def test_aot_unpaired_compares_sorted_gains():
    # Chosen gains 0.0, 0.5; rejected gains 1.5, 1.6.
    expected = (-log(sigma(B * -1.5)) - log(sigma(B * -1.1))) / 2
    assert total_loss(DPO(loss_type="aot_unpaired", beta=B), *two_pairs()) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_aot_has_the_gradient_of_its_sorted_form(name):
    method, (out, batch) = DPO(loss_type=name, beta=B), two_pairs()
    logps, ref = out.logps_T.requires_grad_(), out.ref_logps_T
    prepared = method.prepare(method.collect(out, batch))
    (ours,) = torch.autograd.grad(method.loss(out, batch, prepared).sums["pairs"], logps)
    gain = logps - ref
    left, right = (logps[::2] - logps[1::2], ref[::2] - ref[1::2]) if name == "aot" else (gain[::2], gain[1::2])
    plain = -torch.nn.functional.logsigmoid(B * (left.sort().values - right.sort().values)).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, logps)[0])


def test_losses_add_up_by_their_weights():
    method = DPO(beta=B, loss_type=["sigmoid", "sft", "hinge"], loss_weights=[2.0, 0.5, 0.0])
    assert total_loss(method, *one_pair()) == pytest.approx(2 * BY_HAND["sigmoid"] + 0.5 * BY_HAND["sft"])


@pytest.mark.parametrize(
    ("divergence", "score"),
    [
        ("forward_kl", lambda x: 1 - exp(-x)),
        ("js_divergence", lambda x: log(2 * sigma(x))),
        ("alpha_divergence", lambda x: (exp(-0.5 * x) - 1) / -0.5),
    ],
)
def test_divergences_change_the_margin(divergence, score):
    expected = -log(sigma(B * (score(CHOSEN) - score(REJECTED))))
    assert total_loss(DPO(beta=B, divergence=divergence), *one_pair()) == pytest.approx(expected)


def test_alpha_divergence_of_order_one_is_the_reverse_kl():
    method = DPO(beta=B, divergence="alpha_divergence", divergence_alpha=1.0)
    assert total_loss(method, *one_pair()) == pytest.approx(BY_HAND["sigmoid"])


def test_ld_alpha_damps_tokens_beyond_the_shorter_completion():
    # Gains of the chosen tokens are 0.2, 0.3, 0.1; the rejected completion has one token.
    expected = -log(sigma(B * (0.2 + 0.25 * (0.3 + 0.1) - REJECTED)))
    assert total_loss(DPO(beta=B, ld_alpha=0.25), *one_pair()) == pytest.approx(expected)


def test_weighting_follows_the_likelihood_of_both_sides():
    out, batch = one_pair()
    out = made_outputs([[-1.0, -0.5, -0.4], [-2.0]], [[-1.2, -0.8, -0.5], [-1.8]],
                       log_collision_T=flat([[-0.7, -0.2, -0.1], [-1.5]]))  # fmt: skip
    method = DPO(beta=B, use_weighting=True)
    assert "log_collision_T" in method.statistics
    assert total_loss(method, out, batch) == pytest.approx(exp(-0.3 - 0.5) * BY_HAND["sigmoid"])


def test_metrics_of_one_pair():
    metrics = metrics_of(DPO(beta=B), *one_pair())
    expected = {"rewards/chosen": BC, "rewards/rejected": BR, "rewards/margins": X, "rewards/accuracies": 1.0}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["logps/chosen"] == pytest.approx(-1.9)
    assert {"entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "logps/rejected"} <= metrics.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "exo_pair"}, "exo_pair needs dpo_label_smoothing above 0"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "dpo_label_smoothing has no effect on hinge"),
        ({"loss_weights": [1.0, 2.0]}, "dpo_loss_weights has 2 entries for 1 losses"),
        ({"loss_type": "aot", "divergence": "forward_kl"}, "forward_kl does not go with dpo_loss_type aot"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "precompute_ref_log_probs must be off"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"loss_type": []}, "at least 1 item"),
        ({"loss_type": "sigmoit"}, "Input should be 'sigmoid'"),
        ({"beta": 0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DPO(**settings)
