"""Cutting a step into micro-batches changes neither its loss, nor its gradient, nor its metrics."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from made_batches import made_batch
from upweight.methods import DPO, EBFT, GDPO, GRPO, IPO, KTO, METHODS, ORM, ORPO, PRM, RLOO, SFT, Distill, SimPO
from upweight.methods.formulas.dpo_losses import SMOOTHED, LossType
from upweight.methods.policy_gradient import DENOMINATOR
from upweight.train.recording.metrics import Meters
from upweight.types import Outputs

DPO_LOSSES = get_args(LossType)
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
TOP_ENTROPY = {"top_entropy_quantile": 0.4, "entropy_coef": 0.1}


def grpo(**settings):
    return GRPO(**settings)


VARIANTS = {
    "sft": SFT(),
    "sft dft": SFT(loss_type="dft"),
    **{f"dpo {name}": DPO(loss_type=name, label_smoothing=0.1 * (name in SMOOTHED)) for name in DPO_LOSSES},
    "dpo sum": DPO(loss_type=["sigmoid", "aot", "sft"], loss_weights=[0.5, 2.0, 0.3]),
    "dpo damped": DPO(ld_alpha=0.3, use_weighting=True),
    "dpo alpha": DPO(divergence="alpha_divergence"),
    "ipo": IPO(),
    "kto": KTO(undesirable_weight=0.5),
    "kto apo": KTO(loss_type="apo_zero_unpaired"),
    "orpo": ORPO(),
    "simpo": SimPO(label_smoothing=0.1),
    "cpo": SimPO(loss_type="sigmoid"),
    "alphapo": SimPO(alpha=0.3),
    **{f"grpo {name}": grpo(loss_type=name, beta=0.1, epsilon_high=0.3, delta=1.5) for name in DENOMINATOR},
    **{f"grpo gspo {name}": grpo(loss_type=name, importance_sampling_level="sequence") for name in DENOMINATOR},
    **{f"grpo {mode}": grpo(sampler_correction_mode=mode, sampler_correction_cap=1.5) for mode in CORRECTIONS},
    **{f"grpo top entropy {name}": grpo(loss_type=name, **TOP_ENTROPY) for name in ("dapo", "bnpo", "grpo")},
    "grpo off-policy mask": grpo(off_policy_mask_threshold=0.05),
    **{f"grpo {name} by token": grpo(loss_type=name, reward_to_go=True, beta=0.1) for name in DENOMINATOR},
    "grpo gspo by token": grpo(reward_to_go=True, importance_sampling_level="sequence", off_policy_mask_threshold=0.05),
    "gdpo": GDPO(beta=0.1),
    "rloo": RLOO(epsilon_high=0.3),
    "ebft structured": EBFT(ce_coef=0.1, rl_coef=0.5, loss_type="grpo", beta=0.1, **TOP_ENTROPY),
    "ebft strided": EBFT(mode="strided", ce_coef=0.1),
    "distill": Distill(),
    "distill mixed": Distill(on_policy=0.5, ce_coef=0.3, temperature=2.0, temperature_squared=True),
    **{
        f"distill top_k {tail}": Distill(top_k=3, tail=tail, divergence="jsd")
        for tail in ("bucket", "renormalise", "drop")
    },
    "orm": ORM(center_rewards_coefficient=0.01),
    "prm": PRM(),
}


class Step:
    """A step of random numbers; its leaves stand for what the engine would compute from the weights."""

    def __init__(self, method):
        random = torch.Generator().manual_seed(7)
        self.method = method
        self.lengths = [3, 5, 1, 4, 2, 6, 4, 0, 7, 2, 3, 3]
        if method.head == "sequence_score":
            self.lengths = [1] * len(self.lengths)
        tokens, count = sum(self.lengths), len(self.lengths)

        def draw(*shape):
            return torch.rand(*shape, generator=random, dtype=torch.float64)

        logps_T = -draw(tokens) - 0.1
        self.leaves = {"logps_T": logps_T, "entropy_T": draw(tokens), "scores_TC": draw(tokens, 2)}
        self.leaves |= {"divergence_T": draw(tokens), "listed_tail_T": -draw(tokens) - 2}
        self.leaves["listed_logps_TK"] = -draw(tokens, 3) - 1.5
        self.fixed = {
            **{name: draw(tokens) for name in ("forward_kl_T", "reverse_kl_T", "teacher_entropy_T", "teacher_logps_T")},
            "agrees_T": draw(tokens) > 0.5,
            "ref_logps_T": logps_T + 0.4 * draw(tokens) - 0.2,
            "mean_logit_T": draw(tokens),
            "is_top_T": draw(tokens) > 0.5,
            "log_collision_T": -draw(tokens),
        }
        self.per_token = {
            "old_logps_T": logps_T + 0.6 * draw(tokens) - 0.3,
            "sampler_logps_T": logps_T + 0.8 * draw(tokens) - 0.4,
            "target_T": torch.randint(0, 2, (tokens,), generator=random),
            "prompt_T": draw(tokens) > 0.7,
            "teacher_logps_TK": -draw(tokens, 3) - 1.5,
        }
        self.per_sequence = {"advantage_S": draw(count) - 0.5}
        if method.discount is not None:
            self.per_token["advantage_T"] = draw(tokens) - 0.5
        if method.name in ("kto", "ebft", "distill"):
            low = -1 if method.name == "kto" else 0
            self.per_sequence["label_S"] = torch.randint(low, 2, (count,), generator=random)
        self.margin_P = draw(count // 2)
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def part(self, pairs):
        """Outputs and batch of some of the pairs of sequences."""
        sequences = [number for pair in pairs for number in (2 * pair, 2 * pair + 1)]
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        tokens = torch.tensor([t for s in sequences for t in range(starts[s], starts[s + 1])], dtype=torch.int64)
        batch = made_batch(
            [self.lengths[s] for s in sequences],
            pair_P2=torch.arange(len(sequences)).view(-1, 2),
            margin_P=self.margin_P[list(pairs)],
            **{name: values[tokens] for name, values in self.per_token.items()},
            **{name: values[sequences] for name, values in self.per_sequence.items()},
        )
        return Outputs(**{name: values[tokens] for name, values in (self.leaves | self.fixed).items()}), batch

    def run(self, cuts, rounded=lambda out, row: out):
        """Loss, gradients and metrics of the step when it is cut like this, and each row's outputs are rounded so."""
        parts = [(rounded(out, row), batch) for row, (out, batch) in enumerate(map(self.part, cuts))]
        collected = [self.method.collect(out, batch) for out, batch in parts]
        prepared = self.method.prepare({name: torch.cat([c[name] for c in collected]) for name in collected[0]})
        counts = add_up(self.method.count(batch) for _, batch in parts)
        losses = [self.method.loss(out, batch, prepared) for out, batch in parts]
        sums = add_up(loss.sums for loss in losses)
        assert sums.keys() == counts.keys()
        total = sum(sums[unit] / counts[unit] for unit in sums)
        gradients = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True)
        meters = Meters()
        for loss in losses:
            meters.add(loss.metrics)
        return total, gradients, meters.drain(Accelerator(cpu=True))


def add_up(dicts):
    result = {}
    for values in dicts:
        for name, value in values.items():
            result[name] = result.get(name, 0) + value
    return result


def test_every_method_and_loss_type_is_among_the_variants():
    assert {method.name for method in VARIANTS.values()} == METHODS.keys()
    assert len(DPO_LOSSES) == 15
    assert {method.loss_type[0] for method in VARIANTS.values() if isinstance(method, DPO)} == set(DPO_LOSSES)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=12)
@given(order=st.permutations(range(6)), ends=st.sets(st.integers(1, 5), min_size=1))
def test_any_cut_gives_the_same_step(name, order, ends):
    step = Step(VARIANTS[name])
    borders = [0, *sorted(ends), 6]
    total, gradients, metrics = step.run([range(6)])
    cut_total, cut_gradients, cut_metrics = step.run([order[a:b] for a, b in pairwise(borders)])
    assert torch.isfinite(total)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
    torch.testing.assert_close(cut_total, total)
    torch.testing.assert_close(cut_gradients, gradients)
    torch.testing.assert_close(cut_metrics, metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9])
@settings(max_examples=12)
@given(order=st.permutations(range(6)), ends=st.sets(st.integers(1, 5), min_size=1))
def test_duplicates_stay_together_at_the_entropy_threshold_though_each_row_rounds_otherwise(share, order, ends):
    step = Step(grpo(top_entropy_quantile=share, entropy_coef=0.1))
    step.lengths, step.per_token = [4] * 10 + [0, 0], {}
    with torch.no_grad():
        for leaf in step.leaves.values():
            leaf.copy_(torch.cat([leaf[:8].clone()] * 5))  # five times the same two sequences

    def rounded(out, row):
        return replace(out, entropy_T=out.entropy_T + 1e-6 * torch.tensor(row).sin())

    borders = [0, *sorted(ends), 6]
    _, gradients, metrics = step.run([range(6)])
    _, cut_gradients, cut_metrics = step.run([order[a:b] for a, b in pairwise(borders)], rounded)
    torch.testing.assert_close(cut_gradients[:2], gradients[:2])
    torch.testing.assert_close(cut_metrics, metrics, rtol=1e-5, atol=1e-5)
