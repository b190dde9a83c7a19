"""Ranks that share a row give the outputs and the gradients of one rank that has it alone, and hold less of it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification

from made_runs import on_ranks
from tiny_models import drawn, gradients, group, relative_difference, sample, staircase, three_levels, tiny
from upweight.engine import Engine
from upweight.engine.activations import add_noise, enable_checkpointing
from upweight.engine.check import check_first_batch, check_first_gradients
from upweight.engine.context_parallel import require_heads
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.train.distributed.ranks import context_parallel_group, join_ranks
from upweight.types import Unit

STATISTICS = frozenset({"entropy_T", "is_top_T"})
ON_TWO = ("llama", "one key head", "mistral", "gemma2", "gpt_oss", "llama4_text", "tied", "adapter", "head adapter",
          "checkpointed", "classifier", "sharded", "short", "one token", "nothing scored")  # fmt: skip
ON_FOUR = ("llama", "one key head")
MODELS = {
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "classifier": ("llama", {"auto": AutoModelForSequenceClassification, "num_labels": 1}),
    **{kind: (kind, {}) for kind in ("mistral", "gemma2", "gpt_oss", "llama4_text")},
}


def made(case):
    kind, changes = MODELS.get(case, ("llama", {}))
    model = tiny(kind, **changes).train()
    if "adapter" in case:
        torch.manual_seed(1)
        targets = ["q_proj", "lm_head"] if case == "head adapter" else ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def batch_for(case):
    """An odd number of tokens; `short` scores tokens of the first slice alone."""
    if case == "one token":
        return build_batch([])
    if case in ("short", "nothing scored"):
        one = sample(drawn(1, 40), prompt=3)
        one.loss_mask[3 if case == "nothing scored" else 6 :] = False
        return build_batch([Unit((one,))])
    batch = build_batch(group() + three_levels() + staircase(), predict=case != "classifier")
    assert batch.ids_BN.shape[1] % 2
    return batch


def forwarded(case, engine, model):
    """Outputs, and a loss in which every token has a weight of its own."""
    batch = batch_for(case)
    out = engine(model, batch, frozenset() if engine.scores else STATISTICS)
    if engine.scores:
        return out, (out.scores_TC[:, 0] * (batch.source_T % 7 - 3.0)).sum()
    return out, (out.logps_T * (batch.target_T % 7 - 3.0)).sum() + 0.3 * out.entropy_T.sum()


def kept(out):
    return {name: value.detach() for name, value in vars(out).items() if value is not None}


def shared(case, context):
    """What this rank's engine makes of a case under a wrapper that averages gradients."""
    model = made(case)
    engine = Engine(model, context=context)
    if case == "checkpointed":
        enable_checkpointing(model)
    if case == "sharded":
        mesh = init_device_mesh("cpu", (context.size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
        if case not in ("one token", "nothing scored"):
            check_first_gradients(engine, model, batch_for(case), torch.float32).require()
    if case != "nothing scored":
        check_first_batch(engine, wrapped, batch_for(case)).require()
    out, loss = forwarded(case, engine, wrapped)
    (context.size * loss).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
    return {"out": kept(out), "gradients": whole}


def saved_bytes(context):
    """What a forward of 2,000 tokens saves for its backward, but for weights."""
    model = made("llama")
    engine = Engine(model, context=context)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        engine(model, build_batch([Unit((sample(drawn(1, 2000), prompt=3),))]))
    return sum(size for place, size in saved.items() if place not in weights)


def run_rank(folder, world, cases):
    join_ranks(60)
    context = context_parallel_group(world)
    rank = context.rank
    for case in cases:
        torch.save(shared(case, context), f"{folder}/{case}-{rank}.pt")
    torch.save(saved_bytes(context), f"{folder}/saved-{rank}.pt")
    if world == 2:
        noisy = made("llama")
        engine = Engine(noisy, context=context)
        add_noise(noisy, 5.0)
        assert forwarded("llama", engine, noisy)[0].logps_T.isfinite().all()
        with pytest.raises(UserError, match="whose rows are padded"):
            Engine(tiny("mamba", num_attention_heads=4), context=context)


@pytest.fixture(scope="module", params=[2, 4])
def ran(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    cases = {2: ON_TWO, 4: ON_FOUR}[request.param]
    on_ranks(run_rank, request.param, str(folder), request.param, cases)
    return folder, request.param, cases


@pytest.mark.slow
def test_ranks_that_share_a_row_are_as_good_as_one(ran):
    folder, world, cases = ran
    for case in cases:
        model = made(case)
        engine = Engine(model)
        out, loss = forwarded(case, engine, model)
        right = gradients(model, loss)
        for rank in range(world):
            found = torch.load(folder / f"{case}-{rank}.pt")
            assert found["out"].keys() == kept(out).keys()
            for name, value in kept(out).items():
                assert found["out"][name].dtype == value.dtype
                torch.testing.assert_close(found["out"][name].float(), value.float(), atol=2e-5, rtol=1e-5)
            if case in ("one token", "nothing scored"):  # the idle token's embedding is zero
                assert not any(gradient.any() for gradient in found["gradients"].values())
            else:
                assert relative_difference(found["gradients"], right) < 1e-5, (case, rank)


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_the_activations(ran):
    folder, world, _ = ran
    alone = saved_bytes(None)
    for rank in range(world):
        assert torch.load(folder / f"saved-{rank}.pt") < 1.1 * alone / world


def test_heads_must_divide():
    require_heads(8, 4)
    with pytest.raises(UserError, match="3 ranks cannot share 8 attention heads evenly; set one of 2, 4, 8"):
        require_heads(8, 3)
