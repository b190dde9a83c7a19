"""Loss and gradient of a step with a teacher that has another tokenizer, against a direct computation in float64."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from made_runs import largest_difference, on_ranks, trainer_for, weights_of
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.methods import Distill
from upweight.models.load import disable_dropout
from upweight.models.reference import SeparateModel
from upweight.train.distill.align import Aligner
from upweight.train.distill.spans import span_gaps, teacher_units
from upweight.train.distill.teachers import LocalTeacher, Teachers
from upweight.train.distill.token_bytes import TokenBytes
from upweight.types import Sample, Unit

OTHER = ["they say that a fox and the dogs answered: maths is 2 + 3, so say it again and again, user"] * 4
RATE = 0.05
STUDENT, TEACHER = byte_tokenizer("chatml"), byte_tokenizer("llama3", corpus=OTHER)
SIZE = len(TEACHER) + 7  # rows of the teacher's head, of which some are no tokens


def student_model():
    model = tiny("llama", num_hidden_layers=2, vocab_size=len(STUDENT))
    disable_dropout(model)
    return model


def teacher_model(size=SIZE):
    model = tiny("qwen3", num_hidden_layers=1, hidden_size=16, vocab_size=size)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def aligner_of(student=STUDENT, teacher=TEACHER):
    return Aligner(TokenBytes(student, "student"), TokenBytes(teacher, "teacher"))


def taught_by(method, aligner, size=SIZE):
    def load(policy, engine, attach_engine):
        model = teacher_model(size)
        reference = SeparateModel(policy, model)
        return Teachers({
            None: LocalTeacher(method, reference, attach_engine(model), len(STUDENT), aligner=aligner),
        })  # fmt: skip

    return {"load_teachers": load}


# Parts of texts, alternately what is read and what is learned; `None` ends a turn.
PARTS = [
    [["The quick dog. "], ["they say that the brown fox jumps", None]],
    [["The quick dog. "], ["dogs answered: maths", None], ["\nuser "], [" again and again"], [" say"], ["so it is"]],
    [["The quick dog. "], ["a"]],
    [["say: "], ["over the lazy dog", None]],
    [["say: "], ["over the fox and the"]],
    [["say"], []],
]


def pieces(tokenizer, parts):
    """Ids of each part, and the characters before each of its tokens; the end of a turn is behind all."""
    for texts in parts:
        ids, at, length = [], [], 0
        for text in texts:
            if text is None:
                ids, at = [*ids, tokenizer.eos_token_id], [*at, length]
                continue
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, at = [*ids, *found["input_ids"]], [*at, *(length + start for start, _ in found["offset_mapping"])]
            length += len(text)
        yield ids, at


def made_units():
    units = []
    for number, parts in enumerate(PARTS):
        ids = [ids for ids, _ in pieces(STUDENT, parts)]
        masks = [np.full(len(one), index % 2 == 1) for index, one in enumerate(ids)]
        units.append(Unit((Sample(np.concatenate(ids).astype(np.int64), np.concatenate(masks)),), number // 2))
    return units


class Direct:
    """Both models in float64, each sequence by itself; outcomes are tokens of one name, and the ends of turns."""

    def __init__(self):
        self.student, teacher = student_model().double(), teacher_model().double()
        known = TEACHER.get_vocab()
        pairs = [(number, known[name]) for name, number in STUDENT.get_vocab().items() if name in known]
        self.shared = [list(side) for side in zip(*[*pairs, (STUDENT.eos_token_id, TEACHER.eos_token_id)], strict=True)]
        self.parts, self.all = [], []
        for parts in PARTS:
            ours, theirs, own, at = [], [TEACHER.bos_token_id], [], []
            scored = []
            for index, (mine, other) in enumerate(zip(pieces(STUDENT, parts), pieces(TEACHER, parts), strict=True)):
                if index % 2:
                    scored += range(len(ours), len(ours) + len(mine[0]))
                    begins = {start: len(theirs) + n for n, start in enumerate(other[1])}
                    for n, start in enumerate(mine[1]):
                        if start in begins:
                            own.append(len(ours) + n)
                            at.append(begins[start])
                ours, theirs = [*ours, *mine[0]], [*theirs, *other[0]]
            z, v = (
                model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
                for model, ids in ((self.student, ours), (teacher, theirs))
            )
            self.parts.append((z[torch.tensor(own, dtype=torch.long) - 1], v[torch.tensor(at, dtype=torch.long) - 1]))
            scored = torch.tensor(scored, dtype=torch.long)
            self.all.append(z[scored - 1].log_softmax(-1).gather(1, torch.tensor(ours)[scored][:, None])[:, 0])

    def outcomes(self, logits, ids, temperature):
        q = (logits / temperature).softmax(-1)
        kept = q[:, ids]
        return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1).log()

    def step(self, method):
        """Loss, metrics and gradients of a step."""
        total, tokens, means = torch.zeros((), dtype=torch.float64), 0, {"own": 0.0, "theirs": 0.0}
        for z, v in self.parts:
            log_q = self.outcomes(z, self.shared[0], method.temperature)
            log_p = self.outcomes(v, self.shared[1], method.temperature).detach()
            p, q = log_p.exp(), log_q.exp()
            if method.kind == "forward_kl":
                total = total + (p * (log_p - log_q)).sum()
            elif method.kind == "reverse_kl":
                total = total + (q * (log_q - log_p)).sum()
            else:
                log_m = (method.beta * p + (1 - method.beta) * q).log()
                total = total + (method.beta * p * (log_p - log_m) + (1 - method.beta) * q * (log_q - log_m)).sum()
            tokens += len(z)
            means["own"], means["theirs"] = (
                means["own"] + q[:, -1].sum().item(),
                means["theirs"] + p[:, -1].sum().item(),
            )
        loss = total / tokens
        scored = sum(map(len, self.all))
        if method.ce_coef:
            loss = loss - method.ce_coef * sum(logps.sum() for logps in self.all) / scored
        named = dict(self.student.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        metrics = {
            "distill/tail_mass": means["own"] / tokens, "distill/teacher_tail_mass": means["theirs"] / tokens,
            "distill/aligned_share": tokens / scored, "distill/divergence": total.item() / tokens,
        }  # fmt: skip
        return loss.item(), dict(zip(named, grads, strict=True)), metrics


class Training:
    """A trainer whose steps may have any method."""

    def __init__(self, folder, aligner, **options):
        method = Distill(on_policy=0)
        parts = taught_by(method, aligner, **options)
        self.trainer = trainer_for(method, folder, model=student_model(), batch=4, parts=parts)
        self.runner = self.trainer.runner

    def step(self, method, units, *, budget=40, layouts=("tree", "tree"), **changes):
        """Loss, gradients and metrics of a step as training computes them."""
        teacher = replace(self.runner.teachers.by_name[None], method=method, **changes)
        self.runner.method = self.runner.packer.method = method
        self.runner.teachers, self.runner.token_budget = Teachers({None: teacher}), budget
        self.runner.engine.layout, teacher.engine.layout = layouts
        self.trainer.model.zero_grad()
        loss = self.runner.train(self.trainer.model, units).item()
        grads = {name: weight.grad.clone() for name, weight in self.trainer.model.named_parameters()}
        return loss, grads, self.runner.meters.drain(self.trainer.accelerator)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return Training(tmp_path_factory.mktemp("run"), aligner_of())


@pytest.fixture(scope="module")
def direct():
    return Direct()


def assert_exact(found, right):
    """To 1e-5, of the largest number of a gradient where that is above 1."""
    assert found[0] == pytest.approx(right[0], abs=1e-5, rel=1e-5)
    scale = max(1.0, *(float(grad.abs().max()) for grad in right[1].values()))
    for name, grad in right[1].items():
        torch.testing.assert_close(found[1][name].double(), grad, atol=1e-5 * scale, rtol=0)
    for name, value in right[2].items():
        assert found[2][name] == pytest.approx(value, abs=1e-5), name


METHODS = [
    Distill(on_policy=0, divergence="forward_kl", temperature=1.5),
    Distill(on_policy=0, divergence="reverse_kl"),
    Distill(on_policy=0, divergence="jsd", beta=0.2, temperature=0.7),
    Distill(on_policy=0, divergence="reverse_kl", ce_coef=0.3),
]


@pytest.mark.parametrize("layouts", [*product(("tree", "padded"), repeat=2)], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.divergence} {method.ce_coef}")
def test_a_step_is_the_direct_computation(method, layouts, training, direct):
    right = direct.step(method)
    assert 0.2 < right[2]["distill/aligned_share"] < 0.9
    assert right[2]["distill/teacher_tail_mass"] > 0.01
    assert_exact(training.step(method, made_units(), layouts=layouts), right)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.divergence} {method.ce_coef}")
@settings(max_examples=3, deadline=None)
@given(order=st.permutations(range(len(PARTS))), budget=st.integers(14, 200))
def test_any_order_and_any_cut_give_the_same_step(method, training, direct, order, budget):
    units = [made_units()[index] for index in order]
    assert_exact(training.step(method, units, budget=budget), direct.step(method))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.divergence} {method.ce_coef}")
def test_equal_tokenizers_give_the_loss_of_whole_vocabularies(method, tmp_path):
    training = Training(tmp_path, aligner_of(STUDENT, STUDENT), size=len(STUDENT))
    units = [unit for unit in made_units() if unit.samples[0].loss_mask.any()]
    aligned = training.step(method, units)
    whole = training.step(method, units, aligner=None)
    assert aligned[0] == whole[0]
    for name, grad in whole[1].items():
        assert torch.equal(aligned[1][name], grad), name
    assert aligned[2]["distill/aligned_share"] == 1
    assert aligned[2]["distill/tail_mass"] == aligned[2]["distill/teacher_tail_mass"] == 0


def test_a_prompt_that_the_teacher_alone_sees_is_aligned_too(training, direct):
    method, units = METHODS[1], []
    for unit, parts in zip(made_units(), PARTS, strict=True):
        (sample,) = unit.samples
        length = int(sample.loss_mask.argmax())
        prompt = np.array(STUDENT(parts[0][0], add_special_tokens=False)["input_ids"], np.int64)
        short = np.array(STUDENT("x", add_special_tokens=False)["input_ids"], np.int64)
        if not sample.loss_mask.any() or sample.ids[:length].tolist() != prompt.tolist():
            continue
        ids = np.concatenate([short, sample.ids[length:]])
        mask = np.concatenate([np.zeros(len(short), np.bool_), sample.loss_mask[length:]])
        seen = replace(unit, samples=(Sample(ids, mask),), teacher_prompt=(len(short), prompt))
        (done,) = training.runner.teachers.aligned([seen], keep=False)
        (alone,) = training.runner.teachers.aligned([unit], keep=False)
        assert done.samples[0].teacher_text.ids.tolist() == alone.samples[0].teacher_text.ids.tolist()
        own, other = (np.flatnonzero(one.samples[0].loss_mask) for one in (done, alone))
        assert (own - len(short)).tolist() == (other - length).tolist()
        units.append(seen)
    assert len(units) == len(PARTS) - 1
    assert training.step(method, units)[0] > 0


def test_a_span_has_the_log_ratio_of_its_text():
    aligner, model = aligner_of(), teacher_model()
    for unit, parts in zip(made_units(), PARTS, strict=True):
        (sample,) = unit.samples
        aligned = aligner.alignment(sample)
        ((read,),) = [one.samples for one in teacher_units([unit], [[aligned]])]
        logits = model(input_ids=torch.tensor(aligned.ids)[None]).logits[0].log_softmax(-1).detach()
        logps = logits[:-1].gather(1, torch.tensor(aligned.ids)[1:, None])[:, 0].numpy()
        sampler = np.random.default_rng(0).normal(size=int(sample.loss_mask.sum())).astype(np.float32)
        values, shares = span_gaps(sample, aligned, logps[np.flatnonzero(read.loss_mask) - 1], sampler)
        total = 0.0
        position, length = 0, 1
        for index, ((ours, starts), (theirs, begins)) in enumerate(
            zip(pieces(STUDENT, parts), pieces(TEACHER, parts), strict=True)
        ):
            if index % 2 and ours:
                total += logps[length - 1 : length - 1 + len(theirs)].sum()
                bounds = [n for n, start in enumerate(starts) if start in begins]
                for first, after in zip(bounds, [*bounds[1:], len(ours)], strict=True):
                    span = values[position + first : position + after]
                    assert (span == span[0]).all()
                    assert shares[position + first] == pytest.approx(span[0] / (after - first))
            position, length = position + (len(ours) if index % 2 else 0), length + len(theirs)
        assert shares.sum() == pytest.approx(total - sampler.sum(), abs=1e-3)


def on_two_ranks(folder):
    for number, method in enumerate(METHODS):
        parts = taught_by(method, aligner_of())
        trainer = trainer_for(
            method, folder, model=student_model(), batch=4, budget=40, max_steps=1, parts=parts
        )  # fmt: skip
        before = weights_of(trainer)
        trainer.get_train_dataloader = lambda: [{"units": made_units()}]
        trainer.train()
        if trainer.is_world_process_zero():
            after = weights_of(trainer)
            grads = {name: (before[name] - after[name]) / RATE for name in before}
            torch.save((trainer.state.log_history[0], grads), folder / f"{number}.pt")


@pytest.mark.slow
def test_two_ranks_take_the_direct_computations_step(direct, tmp_path):
    on_ranks(on_two_ranks, 2, tmp_path)
    for number, method in enumerate(METHODS):
        (log, grads), right = torch.load(tmp_path / f"{number}.pt"), direct.step(method)
        assert log["loss"] == pytest.approx(right[0], abs=2e-4)  # logs are rounded
        assert log["distill/aligned_share"] == pytest.approx(right[2]["distill/aligned_share"], abs=2e-4)
        assert largest_difference({name: grad.double() for name, grad in grads.items()}, right[1]) < 1e-4
