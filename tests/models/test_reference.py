import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from upweight.models.precision import set_up_precision
from upweight.models.reference import adapter_state, make_reference, reference_kind

BF16 = torch.bfloat16


def llama(dtype=torch.float32, **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})).to(dtype)


def lora(base, **changes) -> PeftModel:
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.5, **changes}
    return get_peft_model(base, LoraConfig(**settings))


def ids() -> torch.Tensor:
    return torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(3))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids()).logits


def take_steps(model, count: int = 2, copies=None, rate: float = 0.05) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    if copies is not None:
        copies.follow(optimizer)
    model.train()
    for _ in range(count):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def disturb(model) -> None:
    """Make an adapter one that training has already changed."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def make(model, *, dtype=torch.float32, synced: bool = False):
    kind = reference_kind(needed=True, adapter=adapter_state(model), synced=synced)
    return kind, make_reference(kind, model, dtype, synced=synced)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"needed": False, "adapter": "none"}, "none"),
        ({"needed": False, "adapter": "none", "separate": True, "synced": True}, "none"),
        ({"needed": True, "adapter": "none"}, "frozen_weights"),
        ({"needed": True, "adapter": "identity"}, "adapter_off"),
        ({"needed": True, "adapter": "changed"}, "frozen_weights"),
        ({"needed": True, "adapter": "identity", "synced": True}, "frozen_weights"),
        ({"needed": True, "adapter": "identity", "separate": True}, "separate"),
        ({"needed": True, "adapter": "none", "separate": True, "synced": True}, "separate"),
    ],
)
def test_the_kind_of_reference_follows_from_what_is_trained_and_asked(asked, kind):
    assert reference_kind(**asked) == kind


def test_an_adapter_is_an_identity_only_while_it_changes_nothing():
    assert adapter_state(llama()) == "none"
    assert adapter_state(lora(llama())) == "identity"
    assert adapter_state(lora(llama(), use_dora=True, modules_to_save=["lm_head"])) == "identity"
    assert adapter_state(lora(llama(), init_lora_weights="pissa")) == "changed"
    assert adapter_state(lora(llama(), init_lora_weights=False)) == "changed"
    head_only = lora(llama(), modules_to_save=["lm_head"])
    head_only.get_base_model().lm_head.modules_to_save["default"].weight.data.add_(1.0)
    assert adapter_state(head_only) == "changed"
    trained = lora(llama())
    take_steps(trained)
    assert adapter_state(trained) == "changed"
    assert adapter_state(lora(llama(attention_bias=True), bias="none")) == "identity"
    assert adapter_state(lora(llama(attention_bias=True), bias="lora_only")) == "changed"


CASES = {
    "fresh": lambda: lora(llama()),
    "fresh_saving_modules": lambda: lora(llama(), modules_to_save=["lm_head", "embed_tokens"]),
    "pissa": lambda: lora(llama(), init_lora_weights="pissa"),
    "continued": lambda: _continued(lora(llama())),
    "continued_dora_saving_modules": lambda: _continued(lora(llama(), use_dora=True, modules_to_save=["lm_head"])),
    "adapted_embeddings": lambda: _continued(lora(llama(), target_modules=["embed_tokens", "q_proj"])),
    "biases_trained_beside": lambda: lora(llama(attention_bias=True), bias="all"),
    "full": llama,
    "full_tied": lambda: llama(tie_word_embeddings=True),
}


def _continued(model):
    disturb(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("case", CASES)
def test_after_training_the_reference_still_computes_what_the_policy_did_at_the_start(case, dtype):
    model = CASES[case]().to(dtype)
    copies = set_up_precision(model, dtype)
    start = logits(model)
    kind, reference = make(model, dtype=dtype)
    assert kind == ("adapter_off" if case.startswith("fresh") else "frozen_weights")
    take_steps(model, copies=copies)
    flags = [p.requires_grad for p in model.parameters()]
    policy = logits(model)
    model.train()
    with reference.use(model) as module:
        assert torch.equal(module(input_ids=ids()).logits, start)
    assert model.training
    assert flags == [p.requires_grad for p in model.parameters()]
    assert torch.equal(logits(model), policy)
    assert not torch.equal(policy, start)


def test_gradients_are_the_same_with_a_reference_forward_between_forward_and_backward():
    grads = []
    for between in (False, True):
        model = _continued(lora(llama(BF16), lora_dropout=0.0))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        copies = set_up_precision(model, BF16)
        _, reference = make(model, dtype=BF16)
        take_steps(model, copies=copies)
        loss = model(input_ids=ids(), labels=ids()).loss
        if between:
            with reference.use(model) as module:
                module(input_ids=ids())
        loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_frozen_part_of_an_adapter_stays_frozen():
    model = lora(llama())
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    _, reference = make(model)
    with reference.use(model) as module:
        module(input_ids=ids())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


@pytest.mark.parametrize("case", ["continued", "full"])
def test_the_reference_is_not_saved_with_the_policy(case):
    model = CASES[case]()
    keys = model.state_dict().keys()
    _, reference = make(model)
    with reference.use(model):
        assert model.state_dict().keys() == keys
    assert model.state_dict().keys() == keys


def test_frozen_weights_hold_the_trained_weights_alone_in_the_compute_dtype():
    model = lora(llama(BF16))
    disturb(model)
    set_up_precision(model, BF16)
    _, reference = make(model, dtype=BF16)
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    assert {name: value.shape for name, value in reference._values.items()} == trained
    assert {value.dtype for value in reference._values.values()} == {BF16}


def test_offloaded_weights_are_on_the_device_only_while_they_are_used():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    reference = make_reference("frozen_weights", model, torch.float32, offload=True)
    kept = dict(reference._values)
    model.to("meta")  # any device but the host
    with reference.use(model):
        assert vars(model[0])["weight"].is_meta
    assert "weight" not in vars(model[0])
    assert not kept["0.weight"].is_meta
    assert reference._values["0.weight"] is kept["0.weight"]


@pytest.mark.parametrize("case", ["fresh", "full"])
def test_a_synced_reference_moves_a_share_of_the_way_and_can_be_restored(case):
    model = CASES[case]()
    kind, reference = make(model, synced=True)
    assert kind == "frozen_weights"
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    take_steps(model, 3)
    reference.sync(0.25)
    now = dict(model.named_parameters())
    for name, value in reference._values.items():
        torch.testing.assert_close(value, 0.25 * now[name].detach() + 0.75 * start[name])
    _, other = make(CASES[case](), synced=True)
    other.load_state_dict(reference.state_dict())
    assert all(torch.equal(other._values[name], value) for name, value in reference._values.items())
    reference.sync(1.0)
    with reference.use(model) as module:
        same = module(input_ids=ids()).logits
    torch.testing.assert_close(same, logits(model))


def test_small_shares_add_up_in_half_precision():
    model = nn.Linear(4, 4, bias=False).to(BF16)
    model.weight.data.fill_(1.0)
    copies = set_up_precision(model, BF16)
    assert copies is not None
    reference = make_reference("frozen_weights", model, BF16, synced=True)
    with torch.no_grad():
        next(model.parameters()).fill_(2.0)
    for _ in range(1000):
        reference.sync(0.001)
    (value,) = reference._values.values()
    assert value.dtype == BF16
    assert float(value.mean()) == pytest.approx(2 - 0.999**1000, abs=0.01)


def test_a_separate_model_is_called_itself_and_follows_when_asked():
    policy, other = llama(), llama()
    other.lm_head.weight.data.zero_()
    reference = make_reference("separate", policy, torch.float32, separate_model=other)
    assert not any(p.requires_grad for p in other.parameters())
    with reference.use(policy) as module:
        assert module is other
    reference.sync(0.5)
    torch.testing.assert_close(other.lm_head.weight, policy.lm_head.weight * 0.5)
    again = make_reference("separate", policy, torch.float32, separate_model=llama())
    again.load_state_dict(reference.state_dict())
    with again.use(policy) as module:
        assert torch.equal(module.lm_head.weight, other.lm_head.weight)


def test_nothing_is_kept_where_no_reference_is_computed():
    assert make_reference("none", llama(), torch.float32) is None


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", ["fresh", "continued", "full"])
def test_the_reference_works_through_ddp(process_group, case):
    model = CASES[case]()
    start = logits(model)
    _, reference = make(model)
    wrapped = DistributedDataParallel(model)
    take_steps(wrapped)
    with reference.use(wrapped) as module:
        assert module is wrapped
        assert torch.equal(module(input_ids=ids()).logits, start)
    take_steps(wrapped, 1)


@pytest.mark.parametrize("case", ["fresh", "continued", "continued_dora_saving_modules", "full"])
def test_the_reference_works_through_fsdp(process_group, case):
    model = CASES[case]().to(BF16)
    set_up_precision(model, BF16, sharding="fsdp")
    _, reference = make(model, dtype=BF16)
    mesh = dist.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    start = logits(model)
    take_steps(model)
    trained = logits(model)
    with reference.use(model) as module:
        assert torch.equal(module(input_ids=ids()).logits, start)
    assert torch.equal(logits(model), trained)
    assert not torch.equal(trained, start)
    following = make_reference("frozen_weights", model, BF16, synced=True)
    take_steps(model)
    following.sync(1.0)
    policy_now = logits(model)
    following.load_state_dict(following.state_dict())
    with following.use(model) as module:
        assert torch.equal(module(input_ids=ids()).logits, policy_now)
