"""Experts in 4 bits against a model that has the same weights unpacked, and the bytes that both hold."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tiny_models import gradients, relative_difference, tiny
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.errors import UserError
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels.experts.lora import add_expert_adapters
from upweight.models.kernels.packed_product import is_packed, unpacked
from upweight.models.load import load_model
from upweight.models.memory import HALF_BYTES, shape_of, weight_bytes

bitsandbytes = pytest.importorskip("bitsandbytes")  # `make test-quant`

PACKED = {"kind": "qlora", "load_in_4bit": True, "pack_experts": True}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(2))


def saved(folder, kind, **changes):
    tiny(kind, **{"num_hidden_layers": 2, **changes}).save_pretrained(folder)
    return ModelSection(base_model=str(folder))


def loaded(section, dtype=torch.float32, **keys):
    return load_model(section, dtype, adapter=AdapterSection(**PACKED | keys))


def both(section):
    """A model with packed experts, and one with the weights that these stand for."""
    packed, plain = loaded(section), loaded(section, pack_experts=False)
    weights = dict(plain.named_parameters())
    for name, weight in packed.named_parameters():
        if name.endswith(tuple(EXPERTS)):
            assert is_packed(weight)
            assert weight.shape == weights[name].shape
            weights[name].data = unpacked(weight)
    return packed, plain


def adapted(model, rank=4):
    torch.manual_seed(1)
    targets = {"target_modules": ["o_proj"], "target_parameters": EXPERTS}
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=12, init_lora_weights=False, **targets))


def outputs(model):
    """Logits, gradients of the adapter, and of the inputs."""
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    found = gradients(model, logits.log_softmax(-1)[..., 5].sum())
    return logits.detach(), found, {"inputs": embeddings.grad}


@pytest.mark.parametrize("rank", [4, 3])  # 3 has to be padded for grouped products
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_packed_experts_compute_what_their_weights_do(kind, rank, tmp_path):
    packed, plain = (adapted(model, rank) for model in both(saved(tmp_path, kind)))
    add_expert_adapters(packed)
    ours, our_gradients, our_inputs = outputs(packed)
    right, right_gradients, right_inputs = outputs(plain)  # by PEFT's forward
    assert any("experts" in name and float(grad.abs().max()) > 0 for name, grad in our_gradients.items())
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
    assert relative_difference(our_gradients, right_gradients) < 1e-5
    assert relative_difference(our_inputs, right_inputs) < 1e-5
    with torch.no_grad(), packed.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(packed(IDS).logits, plain(IDS).logits, atol=1e-5, rtol=1e-5)


def held(model):
    """The bytes of a model's weights, scales of packed ones included."""
    sizes = 0
    for weight in model.parameters():
        sizes += weight.numel() * weight.element_size()
        state = getattr(weight, "quant_state", None)
        tensors = [] if state is None else [state.absmax, *([state.state2.absmax] if state.nested else [])]
        sizes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return sizes


WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 16}


def saved_bytes(model):
    """The bytes beside weights that a forward keeps for its backward."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs_embeds=model.get_input_embeddings()(IDS[:1]).detach().requires_grad_())
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert outputs.logits.requires_grad
    return sum(size for address, size in kept.items() if address not in weights)


def test_less_memory_is_held_and_kept_for_backward(tmp_path):
    section = saved(tmp_path, "qwen3_moe", **WIDE)
    packed, plain = loaded(section, torch.bfloat16), loaded(section, torch.bfloat16, pack_experts=False)
    shape = shape_of(section, "tokens")
    experts = sum(weight.numel() for name, weight in plain.named_parameters() if name.endswith(tuple(EXPERTS)))
    assert held(plain) - held(packed) > 0.7 * HALF_BYTES * experts
    saving = weight_bytes(shape, AdapterSection(load_in_4bit=True)) - weight_bytes(shape, AdapterSection(**PACKED))
    largest = HALF_BYTES * 16 * 2 * 64 * 64  # of one layer's gate and up, which its product needs
    assert saving + largest == pytest.approx(held(plain) - held(packed), rel=0.02)
    packed, plain = adapted(packed, 8), adapted(plain, 8)
    add_expert_adapters(packed)
    assert saved_bytes(packed) < saved_bytes(plain)  # which PEFT gives a copy of all experts
    add_expert_adapters(plain)
    assert saved_bytes(packed) <= 1.01 * saved_bytes(plain)  # in which weights are kept as they are


def test_one_weight_is_whole_at_a_time(tmp_path, monkeypatch):
    section = saved(tmp_path, "mixtral", num_hidden_layers=3)
    quantize, before, alive = bitsandbytes.functional.quantize_4bit, [], []

    def recording(weight, *args, **kwargs):
        if weight.ndim == 3:
            before.append(StorageWeakRef(weight.untyped_storage()))
            alive.append(sum(not reference.expired() for reference in before))
        return quantize(weight, *args, **kwargs)

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", recording)
    loaded(section)
    assert alive == [1] * 6


def test_what_cannot_be_packed_is_refused_by_name(tmp_path, monkeypatch):
    dense = saved(tmp_path / "dense", "llama")
    with pytest.raises(UserError, match="quantize_moe_experts: LlamaForCausalLM has no experts"):
        loaded(dense)
    alone = saved(tmp_path / "alone", "llama4_text", moe_layers=[0, 1])
    with pytest.raises(UserError, match="quantize_moe_experts: Llama4TextExperts of Llama4ForCausalLM"):
        loaded(alone)
    assert not any(is_packed(weight) for weight in load_model(dense, torch.float32).parameters())
    mixture, stock = saved(tmp_path / "mixture", "qwen3_moe"), Qwen3MoeExperts.forward
    with monkeypatch.context() as patch:
        patch.setattr(Qwen3MoeExperts, "forward", lambda *args: 2 * stock(*args))
        with pytest.raises(UserError, match="quantize_moe_experts: Qwen3MoeExperts of"):
            loaded(mixture)
    section = AdapterSection(**PACKED, targets=["q_proj"], modules_to_save=["experts"])
    with pytest.raises(UserError, match=r"lora_modules_to_save: model\.layers\.0\.mlp\.experts is held in 4 bits"):
        attach_adapter(loaded(mixture), section)
    bias = LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
    model = get_peft_model(loaded(saved(tmp_path / "biased", "gpt_oss")), bias)
    add_expert_adapters(model)
    with pytest.raises(UserError, match="quantize_moe_experts: an adapter on gate_up_proj_bias"):
        model(IDS)


def test_an_adapter_is_saved_and_loaded(tmp_path):
    section = saved(tmp_path / "model", "qwen3_moe")
    model = adapted(loaded(section))
    add_expert_adapters(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(loaded(section), str(tmp_path / "adapter"))
    add_expert_adapters(again)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
