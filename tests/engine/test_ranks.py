"""Two gloo ranks, under DDP and under really sharded FSDP2, give the gradients of one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from made_runs import on_ranks
from tiny_models import gradients, group, relative_difference, three_levels, tiny
from upweight.engine import Engine
from upweight.engine.activations import enable_checkpointing
from upweight.engine.check import check_first_batch
from upweight.engine.packing import build_batch, plan_rows
from upweight.models.modules import unwrap_peft
from upweight.train.distributed.ranks import join_ranks

WORLD = 2
MODELS = ("plain", "tied", "adapter", "head_adapter", "head_copy", "checkpointed_adapter")
WRAPPERS = ("ddp", "fsdp2")


def made(kind):
    if kind in ("plain", "tied"):
        return tiny("llama", tie_word_embeddings=kind == "tied")
    targets = {"head_adapter": ["q_proj", "lm_head"]}.get(kind, ["q_proj", "v_proj"])
    saved = ["lm_head"] if kind == "head_copy" else None
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(tiny("llama"), config)


def units():
    return group() + three_levels() + group(4, (3, 6, 2))


def loss(engine, model, batch):
    """A sum in which every token has a weight of its own, whichever row it lies in."""
    out = engine(model, batch, frozenset({"entropy_T"}))
    return (out.logps_T * (batch.target_T % 7 - 3.0)).sum() + 0.3 * out.entropy_T.sum()


def sharded(model):
    """FSDP2 as accelerate lays it: a unit for each layer, the final norm and head (or the head alone), the root."""
    base, mesh = unwrap_peft(model), init_device_mesh("cpu", (WORLD,))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    head = base.get_output_embeddings()
    if head.weight is not base.get_input_embeddings().weight:
        fully_shard([base.model.norm, head] if model is base else head, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def run_rank(folder):
    join_ranks(60)
    rank = dist.get_rank()
    rows = plan_rows(units(), 30, ranks=WORLD)[rank]
    assert len(rows) > 1
    batches = [build_batch([units()[u] for u in row]) for row in rows]
    for kind in MODELS:
        for wrapper in WRAPPERS:
            model = made(kind).train()
            engine = Engine(model)
            if kind.startswith("checkpointed"):
                enable_checkpointing(model, one_node=wrapper == "ddp")
            wrapped = DistributedDataParallel(model) if wrapper == "ddp" else sharded(model)
            check_first_batch(engine, wrapped, batches[0]).require()
            for batch in batches:
                (WORLD * loss(engine, wrapped, batch)).backward()
            found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
            whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
            if rank == 0:
                torch.save(whole, f"{folder}/{kind}-{wrapper}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(run_rank, WORLD, str(folder))
    return folder


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_give_the_gradients_of_one(folder: Path, kind, wrapper):
    model = made(kind).train()
    engine = Engine(model)
    right = gradients(model, loss(engine, model, build_batch(units())))
    assert relative_difference(torch.load(folder / f"{kind}-{wrapper}.pt"), right) < 1e-5
