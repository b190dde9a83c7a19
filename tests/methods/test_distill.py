import math

import pytest
import torch

from made_batches import flat, made_batch, metrics_of, total_loss
from upweight.methods import Distill
from upweight.types import Outputs


def outputs(divergence, logps=None, **more):
    values_T = flat(divergence)
    zeros_T = torch.zeros_like(values_T)
    names = ("forward_kl_T", "reverse_kl_T", "teacher_entropy_T", "teacher_logps_T", "agrees_T", "entropy_T")
    logps_T = zeros_T if logps is None else flat(logps)
    return Outputs(logps_T=logps_T, divergence_T=values_T, **dict.fromkeys(names, zeros_T) | more)


def test_every_scored_token_counts_alike():
    out, batch = outputs([[0.5, 1.5], [4.0]]), made_batch([2, 1])
    assert total_loss(Distill(), out, batch) == pytest.approx(2.0)
    assert total_loss(Distill(coef=0.5), out, batch) == pytest.approx(1.0)


def test_the_square_of_the_temperature_is_a_factor_only_where_it_is_asked_for():
    out, batch = outputs([[0.5, 1.5], [4.0]]), made_batch([2, 1])
    assert total_loss(Distill(temperature=3.0), out, batch) == pytest.approx(2.0)
    assert total_loss(Distill(temperature=3.0, temperature_squared=True), out, batch) == pytest.approx(18.0)


def test_the_cross_entropy_is_of_the_completions_that_the_data_has():
    out = outputs([[1.0, 1.0], [1.0]], logps=[[-2.0, -4.0], [-100.0]])
    mixed = made_batch([2, 1], label_S=[1, 0])
    assert total_loss(Distill(on_policy=0.5, ce_coef=0.5), out, mixed) == pytest.approx(1 + 0.5 * 3)
    offline = made_batch([2, 1])
    assert total_loss(Distill(on_policy=0, ce_coef=0.3), out, offline) == pytest.approx(1 + 0.1 * 106)


def listed(policy, others, teacher, **settings):
    """The loss of one token, from the probabilities of the listed tokens."""
    logs = {"listed_logps_TK": torch.tensor([policy]).log(), "listed_tail_T": torch.tensor([others]).log()}
    batch = made_batch([1], teacher_logps_TK=torch.tensor([teacher]).log())
    out = Outputs(logps_T=torch.zeros(1), entropy_T=torch.zeros(1), agrees_T=torch.ones(1), **logs)
    return total_loss(Distill(top_k=2, **settings), out, batch), metrics_of(Distill(top_k=2, **settings), out, batch)


def test_the_tail_is_one_outcome_more():
    value, metrics = listed([0.2, 0.3], 0.5, [0.6, 0.3], divergence="forward_kl")
    assert value == pytest.approx(0.6 * math.log(3) + 0.1 * math.log(0.2), abs=1e-6)
    assert metrics["distill/tail_mass"] == pytest.approx(0.5)
    assert metrics["distill/teacher_tail_mass"] == pytest.approx(0.1, abs=1e-6)
    value, _ = listed([0.2, 0.3], 0.5, [0.6, 0.3], divergence="reverse_kl", tail="renormalise")
    assert value == pytest.approx(0.4 * math.log(0.4 * 1.5) + 0.6 * math.log(0.6 * 3), abs=1e-6)


def test_a_token_that_the_teacher_does_not_list_is_part_of_the_tail():
    value, _ = listed([0.2, 1.0], 0.8, [0.6, 0.0], divergence="reverse_kl")  # as vLLM sends minus infinity
    assert value == pytest.approx(0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4), abs=1e-6)
    assert listed([1.0, 1.0], 1.0, [0.0, 0.0], divergence="jsd")[0] == pytest.approx(0.0, abs=1e-6)
    assert listed([1.0, 1.0], 1.0, [0.0, 0.0], tail="renormalise")[0] == pytest.approx(0.0, abs=1e-6)


def test_the_ends_of_jsd_are_the_two_kls():
    kinds = [Distill(divergence="jsd", beta=beta).kind for beta in (0.0, 0.5, 1.0)]
    assert kinds == ["forward_kl", "jsd", "reverse_kl"]


def test_terms_that_would_not_act_are_refused():
    with pytest.raises(ValueError, match="nothing is trained"):
        Distill(coef=0)
    with pytest.raises(ValueError, match="one renormalised token has probability 1"):
        Distill(top_k=1, tail="renormalise")
    with pytest.raises(ValueError, match=r"set distill\.on_policy below 1"):
        Distill(ce_coef=0.1)
