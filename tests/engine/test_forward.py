import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, TaskType, get_peft_model

from tiny_models import drawn, gradients, group, relative_difference, sample, three_levels, tiny, weighted
from upweight.engine import Engine
from upweight.engine.logits import STATISTICS
from upweight.engine.packing import build_batch
from upweight.types import Sample, Unit


def test_only_what_was_asked_for_comes_back():
    model = tiny("llama")
    engine = Engine(model)
    batch = build_batch(group())
    plain = engine(model, batch)
    assert plain.logps_T.shape == batch.source_T.shape
    assert plain.entropy_T is None
    assert plain.scores_TC is None
    everything = engine(model, batch, frozenset(STATISTICS), temperature=0.5)
    for name in STATISTICS:
        assert getattr(everything, name).shape == batch.source_T.shape
    assert not torch.allclose(everything.logps_T, plain.logps_T)
    with pytest.raises(AssertionError, match="unknown"):
        engine(model, batch, frozenset({"entropy"}))


def test_temperature_divides_the_logits():
    model, units = tiny("gemma2"), [Unit((sample(drawn(1, 12), prompt=4),))]
    ids = torch.from_numpy(units[0].samples[0].ids)
    logits = model(ids[None]).logits[0, 3:-1] / 0.6
    out = Engine(model)(model, build_batch(units), temperature=0.6)
    right = logits.log_softmax(-1).gather(1, ids[4:, None])[:, 0]
    torch.testing.assert_close(out.logps_T, right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_features_are_the_plain_hidden_states(layout):
    model, units = tiny("llama"), three_levels()
    depths = (0.0, 0.5, 1.0)
    plain = []
    for unit in units:
        item = unit.samples[0]
        states = model(torch.from_numpy(item.ids)[None], output_hidden_states=True).hidden_states
        at = np.flatnonzero(item.loss_mask) - 1
        plain.append(torch.cat([states[int(depth * 3)][0, at] for depth in depths], -1))
    engine = Engine(model, layout=layout)
    batch = build_batch(units, layout=engine.layout)
    out = engine(model, batch, depths=depths)
    torch.testing.assert_close(out.features_TF, torch.cat(plain), atol=1e-5, rtol=1e-5)
    assert out.logps_T is not None
    chosen = batch.source_T[[3, 0]]
    some = engine(model, batch, depths=depths, feature_positions_T=chosen, head=False)
    torch.testing.assert_close(some.features_TF, out.features_TF[[3, 0]])
    assert some.logps_T is None


def steps(units):
    """The same sequences, scored at their last token and one before it."""
    return [Unit(tuple(Sample(s.ids, np.arange(len(s.ids)) >= len(s.ids) - 2) for s in unit.samples)) for unit in units]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_next"])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_scores_equal_those_of_each_sequence_alone(kind, adapter, task):
    model = tiny(kind, getattr(hf, f"AutoModelFor{task}"), num_labels=2)
    if adapter:
        task_type = TaskType.SEQ_CLS if task.startswith("Seq") else TaskType.TOKEN_CLS
        targets = ["q_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=2, task_type=task_type, target_modules=targets)).eval()
    units = steps(three_levels())
    plain = []
    for unit in units:
        ids = torch.from_numpy(unit.samples[0].ids)
        if task.startswith("Seq"):  # pools the last token of its input
            plain += [model(ids[None, :-1]).logits[0], model(ids[None]).logits[0]]
        else:
            plain += list(model(ids[None]).logits[0, -2:])
    plain = {"scores_TC": torch.stack(plain)}
    slopes = gradients(model, weighted(plain))
    engine = Engine(model)
    out = {"scores_TC": engine(model, build_batch(units, engine.layout, predict=False)).scores_TC}
    torch.testing.assert_close(out["scores_TC"], plain["scores_TC"], atol=1e-5, rtol=1e-5)
    assert relative_difference(gradients(model, weighted(out)), slopes) < 1e-5


def test_padded_rows_are_not_taken_for_trees():
    model = tiny("qwen3_next")
    with pytest.raises(AssertionError, match="padded"):
        Engine(model)(model, build_batch(group()))


def test_the_head_is_called_once_and_logits_never_exist():
    model = tiny("llama")
    engine = Engine(model)
    calls = []
    model.lm_head.register_forward_hook(lambda module, args, out: calls.append(out))
    engine(model, build_batch(group()), frozenset({"entropy_T"}))
    assert len(calls) == 1
    assert set(calls[0]) == {"logps_T", "entropy_T"}


def test_heads_that_do_more_fall_back_to_the_models_own_logits():
    model, units = tiny("modernbert-decoder"), [Unit((sample(drawn(1, 12), prompt=4),))]
    ids = torch.from_numpy(units[0].samples[0].ids)
    right = model(ids[None]).logits[0, 3:-1].log_softmax(-1).gather(1, ids[4:, None])[:, 0]
    out = Engine(model)(model, build_batch(units))
    torch.testing.assert_close(out.logps_T, right, atol=1e-5, rtol=0)


def test_an_idle_row_runs_and_can_be_multiplied_by_zero():
    model = tiny("llama")
    out = Engine(model)(model, build_batch([]))
    (out.logps_T.sum() * 0.0).backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    assert sum(p.grad is not None for p in model.parameters()) == len(list(model.parameters()))
