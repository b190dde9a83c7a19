import copy
import math

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from made_runs import on_ranks
from upweight import log
from upweight.models.precision import ComputeCopies, set_up_precision, trained_weights
from upweight.train.distributed.ranks import join_ranks

BF16 = torch.bfloat16
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def llama(dtype=torch.float32, **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(dtype)


def lora(base, **changes):
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **changes))


def tokens(rows: int = 4, length: int = 8) -> torch.Tensor:
    return torch.randint(0, 48, (rows, length), generator=torch.Generator().manual_seed(3))


def train(model, ids, steps: int, rate: float, copies: ComputeCopies | None = None, *, micro_batches: int = 2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    if copies is not None:
        copies.follow(optimizer)
    losses, norms = [], []
    for _ in range(steps):
        parts = [model(input_ids=part, labels=part).loss / micro_batches for part in ids.chunk(micro_batches)]
        for part in parts:
            part.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(sum(float(part.detach()) for part in parts))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def share_moved(before: dict[str, torch.Tensor], model) -> float:
    now = dict(model.named_parameters())
    moved = sum(int((now[name].detach().float() != value.float()).sum()) for name, value in before.items())
    return moved / sum(value.numel() for value in before.values())


def values_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_at_a_small_rate_all_weights_move_with_masters_and_hardly_any_without():
    everything = torch.arange(48)
    ids, shares = torch.cat([everything, everything.roll(5)]).view(4, 24), {}
    for kind in ("masters", "pure"):
        model = llama(BF16, num_hidden_layers=1)
        copies = set_up_precision(model, BF16, pure=kind == "pure")
        before = values_of(model)
        train(model, ids, 100, 1e-6, copies, micro_batches=1)
        shares[kind] = share_moved(before, model)
    assert shares["masters"] > 0.99
    assert shares["pure"] < 0.1


def test_losses_and_gradient_norms_follow_those_of_a_float32_run():
    ids = tokens()
    model = llama(BF16)
    start = {name: value.float() for name, value in model.state_dict().items()}
    losses, norms = train(model, ids, 15, 3e-3, set_up_precision(model, BF16))
    plain = llama()
    plain.load_state_dict(start)
    plain_losses, plain_norms = train(plain, ids, 15, 3e-3)
    assert plain_losses[-1] < plain_losses[0] - 0.3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses), atol=0.01, rtol=0)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(plain_norms), atol=0.01, rtol=0.05)


def test_forwards_see_the_compute_dtype_and_everyone_else_the_masters():
    model = llama(BF16)
    set_up_precision(model, BF16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert {m.weight.dtype for m in model.modules() if isinstance(m, nn.Linear)} == {BF16}
    assert model(input_ids=tokens()).logits.dtype == BF16


def test_micro_batches_add_up_in_float32():
    model = llama(BF16)
    set_up_precision(model, BF16)
    module, weight = model.lm_head, dict(model.lm_head.named_parameters())["weight"]
    for value in (1.0, 2.0**-12):  # bfloat16 cannot hold their sum
        (module.weight * value).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full_like(weight, 1.0 + 2.0**-12))


def test_the_cast_runs_once_per_step_and_copies_keep_their_storage():
    model = llama(BF16)
    copies = set_up_precision(model, BF16)
    held = model.lm_head.weight
    train(model, tokens(), 1, 1e-2, copies)
    assert model.lm_head.weight is held
    assert torch.equal(held, model.lm_head._parameters["weight"].to(BF16))


def test_small_weights_are_cast_together_with_the_same_gradients(monkeypatch):
    ids, grads, steps = tokens(), [], []
    for limit in (1 << 28, 0):
        monkeypatch.setattr("upweight.models.precision.CAST_TOGETHER", limit)
        model = lora(llama(BF16))
        copies = set_up_precision(model, BF16)
        assert len({copy.grad_fn for copy in copies._copies}) == (1 if limit else len(copies._copies))
        for part in ids.chunk(2):  # more than one backward passes through the cast
            model(input_ids=part, labels=part).loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
        steps.append(train(model, ids, 3, 1e-2, copies))
    assert all(grad.dtype == torch.float32 for grad in grads[0].values())
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert steps[0] == steps[1]


def test_weights_without_a_gradient_get_none_from_the_common_cast():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    set_up_precision(model, BF16)
    model[1](torch.ones(1, 2, dtype=BF16)).sum().backward()
    masters = dict(model.named_parameters())
    assert masters["0.weight"].grad is None
    assert masters["1.weight"].grad.dtype == torch.float32


def test_tied_weights_share_one_copy():
    model = llama(BF16, tie_word_embeddings=True)
    copies = set_up_precision(model, BF16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train(model, tokens(), 2, 1e-2, copies)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens._parameters["weight"].to(BF16))


def test_weights_that_the_architecture_keeps_in_float32_stay_so():
    model = llama(BF16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    set_up_precision(model, BF16)
    assert model.model.norm.weight.dtype == torch.float32
    assert "weight" not in vars(model.model.norm)


def test_a_float32_model_asked_for_bfloat16_is_computed_in_it():
    model = lora(llama())
    set_up_precision(model, BF16)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {BF16}
    assert model(input_ids=tokens()).logits.dtype == BF16


def test_float32_needs_no_copies():
    assert set_up_precision(llama(), torch.float32) is None


@pytest.mark.parametrize("extra", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_have_float32_masters_and_run_no_float32_matmul(extra):
    model = lora(llama(BF16), **extra)
    copies = set_up_precision(model, BF16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {BF16}
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(name in str(function) for name in ("aten.mm.", "aten.addmm.")):
                seen.append((args[0].dtype, args[1].dtype))
            return function(*args, **(kwargs or {}))

    before = values_of(model)
    with Watch():
        train(model, tokens(), 2, 1e-4, copies)
    assert seen
    assert set(seen) == {(BF16, BF16)}
    assert share_moved(before, model) > 0.95


def test_adapted_embeddings_survive_switching_the_adapter():
    model = get_peft_model(llama(BF16), LoraConfig(target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"))
    copies = set_up_precision(model, BF16)
    with model.disable_adapter(), torch.no_grad():
        model(input_ids=tokens())
    losses, _ = train(model, tokens(), 3, 1e-2, copies)
    assert losses[-1] < losses[0]


def test_loaded_weights_reach_the_copies():
    model = llama(BF16)
    set_up_precision(model, BF16)
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        assert bool((model.lm_head.weight == 0.5).all())
        assert model.lm_head.weight.dtype == BF16
        state = {name: value * 2 for name, value in state.items()}
        model.load_state_dict(state)
        assert bool((model.lm_head.weight == state["lm_head.weight"][0, 0].to(BF16)).all())
        state = {name: value / 2 for name, value in state.items()}


def test_removed_copies_leave_a_plain_model():
    model = llama(BF16)
    copies = set_up_precision(model, BF16)
    copies.remove()
    assert isinstance(model.lm_head.weight, nn.Parameter)
    assert copy.deepcopy(model).lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    grads = []
    for checkpointing in (False, True):
        model = llama(BF16).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        set_up_precision(model, BF16)
        for part in tokens().chunk(2):
            model(input_ids=part, labels=part).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_pure_half_precision_warns_and_keeps_no_masters():
    log._warned.clear()
    model = lora(llama(BF16))
    with pytest.MonkeyPatch.context() as patch:
        heard = []
        patch.setattr(log.logger, "warning", lambda text, *args: heard.append(text % args))
        assert set_up_precision(model, BF16, pure=True) is None
    assert len(heard) == 1
    assert "float32 masters" in heard[0]
    assert {p.dtype for p in model.parameters()} == {BF16}


def test_trained_weights_are_listed_once_with_their_compute_dtype():
    weights = trained_weights(lora(llama(BF16)), BF16)
    assert len(weights) == 8
    assert {weight.dtype for weight in weights} == {BF16}


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_sees_float32_gradients_of_every_micro_batch(process_group):
    ids = tokens()
    plain = llama(BF16)
    expected = train(plain, ids, 3, 1e-2, set_up_precision(plain, BF16))
    model = llama(BF16)
    copies = set_up_precision(model, BF16, sharding="ddp")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.0)
    copies.follow(optimizer)
    for step in range(3):
        first, second = ids.chunk(2)
        with wrapped.no_sync():
            (wrapped(input_ids=first, labels=first).loss / 2).backward()
        (wrapped(input_ids=second, labels=second).loss / 2).backward()
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        assert math.isclose(float(norm), expected[1][step], rel_tol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


def one_rank_of_two(folder: str) -> None:
    join_ranks(60)
    rank = dist.get_rank()
    for kind, build in KINDS.items():
        model = build()
        copies = set_up_precision(model, BF16, sharding="ddp")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)  # DDP overwrites this with the weights of rank 0
        wrapped = DistributedDataParallel(model)
        _, norms = train(wrapped, tokens().chunk(2)[rank], 3, 1e-2, copies, micro_batches=1)
        torch.save((model.state_dict(), norms), f"{folder}/{kind}{rank}")


KINDS = {"full": lambda: llama(BF16), "lora": lambda: lora(llama(BF16))}


@pytest.mark.slow
def test_two_ddp_ranks_train_as_one(tmp_path):
    on_ranks(one_rank_of_two, 2, str(tmp_path))
    for kind, build in KINDS.items():
        model = build()
        _, norms = train(model, tokens(), 3, 1e-2, set_up_precision(model, BF16))
        (first, first_norms), (second, second_norms) = (torch.load(tmp_path / f"{kind}{rank}") for rank in range(2))
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert first_norms == second_norms
        torch.testing.assert_close(torch.tensor(first_norms), torch.tensor(norms), rtol=1e-5, atol=0)
        torch.testing.assert_close(dict(first), dict(model.state_dict()), rtol=0, atol=2e-4)


def test_fsdp_does_the_same_by_its_own_policy(process_group):
    ids = tokens()
    plain = lora(llama(BF16))
    expected, _ = train(plain, ids, 4, 1e-2, set_up_precision(plain, BF16))
    model = lora(llama(BF16))
    assert set_up_precision(model, BF16, sharding="fsdp") is None
    mesh = dist.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    losses, _ = train(model, ids, 4, 1e-2)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-3, rtol=0)


def test_deepspeed_gets_the_compute_dtype_to_make_its_own_masters_from():
    model = lora(llama(BF16))
    assert set_up_precision(model, BF16, sharding="deepspeed") is None
    assert {p.dtype for p in model.parameters()} == {BF16}


class FollowOptimizer(TrainerCallback):
    def __init__(self, copies):
        self.copies = copies

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.copies.refresh()
        self.copies.follow(optimizer)


def run_trainer(folder, model, steps: int, resume: str | None = None) -> Trainer:
    copies = set_up_precision(model, BF16)
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.005,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[FollowOptimizer(copies)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
def test_a_resumed_trainer_run_equals_an_uninterrupted_one(tmp_path, kind):
    def fresh():
        model = llama(BF16, tie_word_embeddings=kind == "tied")
        return lora(model) if kind == "lora" else model

    whole = run_trainer(tmp_path / "whole", fresh(), 4)
    run_trainer(tmp_path / "parts", fresh(), 2)
    resumed = run_trainer(tmp_path / "parts", fresh(), 4, resume=str(tmp_path / "parts" / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    norms = [entry["grad_norm"] for entry in whole.state.log_history if "grad_norm" in entry]
    assert all(norm > 0.005 for norm in norms)
    file = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    assert {v.dtype for v in load_file(tmp_path / "parts" / "checkpoint-4" / file).values()} == {torch.float32}
    if kind != "lora":
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-4", dtype="auto")
        assert torch.equal(again.lm_head.weight, whole.model.lm_head._parameters["weight"])
