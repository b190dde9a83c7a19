"""A step's loss and gradients against a plain computation, one sequence at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from made_runs import OFFLINE, policy_for, rows_for, trainer_for
from tiny_models import gradients, relative_difference
from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.methods import DPO, SFT
from upweight.types import Sample, Unit


def log_probs(model, prompt, answer):
    """Log-probs of the answer's tokens, from the model's own logits."""
    ids = torch.tensor(prompt + answer)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logits.gather(1, ids[1:, None])[len(prompt) - 1 :, 0]


def hidden(model, ids):
    return model.model(input_ids=torch.tensor(ids)[None], use_cache=False).last_hidden_state[0]


def sides(model, row):
    return [log_probs(model, row["prompt_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected")]


def plain_sft(method, model, reference, rows):
    found = []
    for row in rows:
        start = row["loss_mask"].index(True)
        found.append(log_probs(model, row["input_ids"][:start], row["input_ids"][start:]))
    return -torch.cat(found).mean()


def plain_dpo(method, model, reference, rows):
    losses = []
    for row in rows:
        with torch.no_grad():
            before = [side.sum() for side in sides(reference, row)]
        chosen, rejected = (side.sum() for side in sides(model, row))
        losses.append(-F.logsigmoid(method.beta * (chosen - before[0] - rejected + before[1])))
    return torch.stack(losses).mean()


def plain_kto(method, model, reference, rows):
    def drift(prompt, answer):
        with torch.no_grad():
            before = log_probs(reference, prompt, answer).sum()
        return log_probs(model, prompt, answer).sum() - before

    with torch.no_grad():
        mismatched = [drift(row["prompt_ids"], rows[n - 1]["completion_ids"]) for n, row in enumerate(rows)]
        kl = torch.stack(mismatched).mean().clamp(min=0)
    losses = []
    for row in rows:
        gain = drift(row["prompt_ids"], row["completion_ids"])
        good = row["label"]
        weight = method.desirable_weight if good else method.undesirable_weight
        losses.append(weight * (1 - torch.sigmoid(method.beta * (gain - kl if good else kl - gain))))
    return torch.stack(losses).mean()


def plain_orpo(method, model, reference, rows):
    likelihood, odds = [], []
    for row in rows:
        whole = row["prompt_ids"] + row["chosen_ids"]
        likelihood.append(log_probs(model, whole[:1], whole[1:]))
        chosen, rejected = (side.mean() for side in sides(model, row))
        odds.append(chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp())))
    return -torch.cat(likelihood).mean() - method.alpha * F.logsigmoid(torch.stack(odds)).mean()


def plain_simpo(method, model, reference, rows):
    margins, likelihood = [], []
    for row in rows:
        chosen, rejected = sides(model, row)
        margins.append(method.beta * (chosen.mean() - rejected.mean()) - method.gamma)
        likelihood.append(chosen)
    return -F.logsigmoid(torch.stack(margins)).mean() - method.nll_weight * torch.cat(likelihood).mean()


def plain_orm(method, model, reference, rows):
    losses = []
    for row in rows:
        ends = [hidden(model, row["prompt_ids"] + row[f"{side}_ids"])[-1] for side in ("chosen", "rejected")]
        chosen, rejected = (model.score(end)[0] for end in ends)
        centred = method.center_rewards_coefficient * (chosen + rejected) ** 2
        losses.append(-F.logsigmoid(chosen - rejected - row["margin"]) + centred)
    return torch.stack(losses).mean()


def plain_prm(method, model, reference, rows):
    scores, labels = [], []
    for row in rows:
        at = [place for place, label in enumerate(row["labels"]) if label != -100]
        scores.append(model.score(hidden(model, row["input_ids"])[at]))
        labels += [row["labels"][place] for place in at]
    return F.cross_entropy(torch.cat(scores), torch.tensor(labels))


PLAIN = {
    "sft": plain_sft, "dpo": plain_dpo, "kto": plain_kto, "orpo": plain_orpo, "simpo": plain_simpo, "orm": plain_orm,
    "prm": plain_prm,
}  # fmt: skip


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("name", PLAIN)
def test_loss_and_gradients_equal_a_plain_computation(name, budget, tmp_path):
    method, rows = OFFLINE[name], rows_for(OFFLINE[name], 7)
    trainer = trainer_for(method, tmp_path, rows=rows, budget=budget)
    model, plain = trainer.model, policy_for(method)
    reference = policy_for(method)
    with torch.no_grad():  # away from the reference, where the gradient of every term counts
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            change = 0.05 * torch.sin(torch.arange(one.numel()).float()).view_as(one)
            one.add_(change)
            other.add_(change)
    found = trainer.runner.train(model, units_of(rows, method))
    found_gradients = {n: p.grad for n, p in model.named_parameters()}
    right = PLAIN[name](method, plain, reference, rows)
    torch.testing.assert_close(found, right.detach(), rtol=1e-4, atol=1e-5)
    assert relative_difference(found_gradients, gradients(plain, right)) < 1e-4


def test_evaluation_counts_as_training_does(tmp_path):
    method, rows = OFFLINE["dpo"], rows_for(OFFLINE["dpo"], 7)
    trainer = trainer_for(method, tmp_path, rows=rows)
    loss = trainer.runner.train(trainer.model, units_of(rows, method))
    result, counts = trainer.runner.evaluate(trainer.model, units_of(rows, method))
    torch.testing.assert_close(result.sums["pairs"] / counts["pairs"], loss)
    assert float(counts["pairs"]) == 7


@pytest.mark.parametrize("budget", [8, 4096])
def test_sequences_without_anything_scored_break_nothing(budget, tmp_path):
    rows = rows_for(SFT(), 4)
    unscored = [{"input_ids": row["input_ids"], "loss_mask": [False] * len(row["input_ids"])} for row in rows]
    trainer = trainer_for(SFT(), tmp_path, rows=rows, budget=budget)
    alone = trainer.runner.train(trainer.model, units_of(rows, SFT()))
    joined = trainer.runner.train(trainer.model, units_of(rows + unscored, SFT()))
    torch.testing.assert_close(joined, alone)


def test_precomputed_reference_log_probs_are_used_instead_of_a_forward(tmp_path):
    rows = rows_for(DPO(), 4)
    trainer = trainer_for(DPO(), tmp_path, rows=rows)
    known = [
        row | {f"ref_{side}_logps": np.zeros(len(row[f"{side}_ids"])) for side in ("chosen", "rejected")}
        for row in rows
    ]
    trainer.runner.train(trainer.model, units_of(known, DPO()))
    metrics = trainer.runner.meters.drain(trainer.accelerator)
    assert metrics["rewards/chosen"] == pytest.approx(0.1 * metrics["logps/chosen"], rel=1e-5)


def test_rows_are_proven_again_once_they_are_much_longer(tmp_path):
    trainer = trainer_for(SFT(), tmp_path)
    widths = []  # of all forwards: the step's own, and those of single sequences that prove it
    trainer.model.model.embed_tokens.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[-1]))

    def proven(length, count=1):
        rng = np.random.default_rng(length)
        samples = [Sample(rng.integers(3, 60, length), np.arange(length) > 1) for _ in range(count)]
        widths.clear()
        trainer.runner.train(trainer.model, [Unit((sample,), group=n) for n, sample in enumerate(samples)])
        assert max(widths) == length * count  # one packed row
        return widths.count(length) > (count == 1)

    found = [proven(10), proven(19), proven(20), proven(20, 2), proven(40), proven(10)]
    assert found == [True, False, True, True, True, False]


def test_a_first_step_whose_pairs_are_one_answer_twice_is_no_fault(tmp_path):
    trainer = trainer_for(DPO(), tmp_path)
    rng = np.random.default_rng(0)
    one, other = (Sample(rng.integers(3, 60, 8), np.arange(8) > 1) for _ in range(2))
    head = trainer.model.get_output_embeddings().weight  # at 0 and frozen, no weight below it gets a gradient
    trainer.model.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros_like(head), requires_grad=False)
    trainer.runner.train(trainer.model, [Unit((one, one)), Unit((other, other))])
    trainer.runner.row_check.checked = None
    with pytest.raises(UserError, match="without a gradient"):
        trainer.runner.train(trainer.model, [Unit((one, one)), Unit((one, other))])


def test_weights_that_are_ruined_from_the_start_are_named(tmp_path):
    trainer = trainer_for(SFT(), tmp_path)
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"the weight \S+ holds NaN or infinity"):
        trainer.runner.train(trainer.model, [Unit((Sample(np.arange(8) % 3, np.arange(8) > 1),))])


def test_weights_that_differ_only_later_are_said_to_be_ruined(tmp_path):
    trainer = trainer_for(SFT(), tmp_path)
    rng = np.random.default_rng(0)

    def step(length):
        trainer.runner.train(trainer.model, [Unit((Sample(rng.integers(3, 60, length), np.arange(length) > 1),))])

    step(8)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"agreed in the first step.*lower `learning_rate`"):
        step(32)


class CountsOtherwise(SFT):
    """Counts by another name than its loss is summed by."""

    def count(self, batch):
        return {"words": super().count(batch)["tokens"]}


def test_sums_have_the_names_of_the_counts(tmp_path):
    with pytest.raises(UserError, match=r"count\(\) has \['words'\], and the loss is summed by \['tokens'\]"):
        trainer_for(CountsOtherwise(), tmp_path).train()
