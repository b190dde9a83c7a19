from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import Qwen2Config

from tiny_models import tiny
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.models.memory import (
    GIB,
    Savings,
    TokenBytes,
    adapter_parameters,
    adapts_blocks,
    estimate,
    free_memory,
    longest,
    optimizer_bytes,
    sampler_bytes,
    shape_of,
    total_memory,
    usable,
    weight_bytes,
)

RECOMPUTED = Savings(recompute=True)
LORA = AdapterSection(kind="lora", rank=16, target_linear=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The shape that docs/performance.md measures."""
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    Qwen2Config(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True, **sizes).save_pretrained(folder)
    return shape_of(ModelSection(base_model=str(folder)), "tokens")


def need(shape, trained, **changes):
    options = {"optimizer": "sgd", "reference": False, "tokens": 10_240, **changes}
    options.setdefault("savings", RECOMPUTED)
    return estimate(shape, trained, options.pop("adapter", LORA), **options)


def test_measured_peaks_are_met_within_a_tenth(qwen):
    """One H200, GRPO on rows of 10,240 tokens, forward and backward without an optimizer: 5.2 and 20.7 GiB."""
    assert need(qwen, "lora").total / GIB == pytest.approx(5.2, rel=0.1)
    assert need(qwen, "all").total / GIB == pytest.approx(20.7, rel=0.1)


def test_measured_peaks_with_kept_activations_are_met_within_a_tenth(qwen):
    """One H200, 4 prompts of 280 tokens with 8 completions of 256, all activations kept: 22 and 34 GiB."""
    row = {"tokens": 4 * (280 + 8 * 256), "savings": Savings()}
    assert need(qwen, "lora", **row).total / GIB == pytest.approx(22, rel=0.1)
    assert need(qwen, "all", **row).total / GIB == pytest.approx(34, rel=0.1)


LEAN = Savings(recompute=True, offload_activations=True, head_chunk=256)
SEVEN = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seven")
    Qwen2Config(vocab_size=151_936, num_key_value_heads=4, tie_word_embeddings=False, **SEVEN).save_pretrained(folder)
    return shape_of(ModelSection(base_model=str(folder)), "tokens")


@pytest.mark.parametrize(
    ("trained", "savings", "tokens", "measured"),
    [
        ("lora", LEAN, 24_576, 5.887),
        ("lora", LEAN, 32_768, 6.773),
        ("lora", LEAN, 36_096, 7.138),
        ("lora", RECOMPUTED, 32_000, 9.027),
        ("lora", RECOMPUTED, 41_472, 10.763),
        ("lora", Savings(), 1408, 6.325),
        ("lora", Savings(), 8704, 20.65),
    ],
)
def test_peaks_of_1_5b_are_met_within_a_twentieth(qwen, trained, savings, tokens, measured):
    """One H200, GRPO steps with AdamW on one row of so many tokens: GiB that `python -m bench.gpu_memory` measured.

    Before gated blocks with adapters were one node (`with_block_nodes`), as in the other tests of measured peaks.
    """
    right = need(qwen, trained, optimizer="adamw_torch", tokens=tokens, savings=savings)
    assert right.total / GIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("trained", "savings", "tokens", "measured"),
    [
        ("lora", LEAN, 2432, 15.514),
        ("lora", LEAN, 18_688, 19.327),
        ("lora", RECOMPUTED, 12_544, 19.944),
        ("lora", Savings(), 1280, 20.626),
        ("qlora", LEAN, 5888, 7.25),
        ("qlora", LEAN, 23_552, 11.37),
        ("qlora", RECOMPUTED, 12_288, 10.766),
        ("qlora", RECOMPUTED, 15_872, 12.223),
    ],
)
def test_peaks_of_7b_are_met_within_a_twentieth(seven, trained, savings, tokens, measured):
    right = need(seven, trained, optimizer="adamw_torch", tokens=tokens, savings=savings)
    assert right.total / GIB == pytest.approx(measured, rel=0.05)


def test_float32_doubles_only_the_weights_that_are_not_quantised(seven):
    packed = AdapterSection(load_in_4bit=True)
    half, single = weight_bytes(seven, packed), weight_bytes(seven, packed, 4)
    assert single - half == 2 * (seven.parameters - seven.linear_parameters)
    assert weight_bytes(seven, None, 4) == 2 * weight_bytes(seven)


@pytest.mark.parametrize(
    ("gib", "fixed", "left"), [(8, 3.0, 6.8686), (16, 14.9, 15.01638), (8, 14.9, 7.13), (8, 130, 7.13)]
)
def test_driver_libraries_and_fragmentation_have_their_part(gib, fixed, left):
    assert usable(gib * GIB, fixed * GIB) / GIB == pytest.approx(left)


def test_a_gate_of_layers_in_8_bits_keeps_one_product_more(qwen):
    one = (
        need(qwen.quantised(), "qlora", savings=Savings()).activations
        - need(qwen, "qlora", savings=Savings()).activations
    )
    assert one == 10_240 * 28 * 8960 * 2
    assert need(qwen.quantised(), "qlora").activations == need(qwen, "qlora").activations


def test_blocks_of_one_node_keep_one_tensor_less(qwen):
    nodes = qwen.with_block_nodes()
    assert qwen.token.saved(Savings()) - nodes.token.saved(Savings()) == 28 * 8960 * 2
    assert qwen.token.peak(Savings()) - nodes.token.peak(Savings()) == 27 * 8960 * 2  # one layer's is as measured
    assert need(nodes, "lora").activations == need(qwen, "lora").activations
    assert nodes.with_block_nodes() == nodes


@pytest.mark.parametrize(
    ("kind", "changes", "product"), [("llama", {}, True), ("llama", {"mlp_bias": True}, False), ("phi3", {}, False)]
)
def test_blocks_that_cannot_be_one_node_are_counted_as_before(kind, changes, product, tmp_path):
    tiny(kind, **changes).save_pretrained(tmp_path)
    assert bool(shape_of(ModelSection(base_model=str(tmp_path)), "tokens").token.product) == product


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"target_linear": True}, True),
        ({"targets": ["gate_proj", "mlp.up_proj", "down_proj"]}, True),
        ({"targets": ["q_proj", "down_proj"]}, False),
        ({"targets": ".*proj"}, False),
        ({"target_parameters": "experts.down_proj"}, False),
        ({"target_linear": True, "dropout": 0.1}, False),
        ({"target_linear": True, "load_in_8bit": True}, False),
    ],
)
def test_adapters_on_all_of_a_gated_block(options, right):
    assert adapts_blocks(AdapterSection(kind="lora", **options)) == right


def test_sizes_are_counted_on_the_model(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    shape = shape_of(ModelSection(base_model=str(tmp_path)), "tokens")
    assert shape == shape_of(ModelSection(base_model=str(tmp_path), model_class="LlamaForCausalLM"), "tokens")
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    one = AdapterSection(kind="lora", rank=3, targets=["q_proj"])
    right = sum(3 * sum(m.weight.shape) for n, m in model.named_modules() if n.endswith("q_proj"))
    assert adapter_parameters(shape, one) == right
    every = sum(
        3 * sum(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"
    )
    assert adapter_parameters(shape, AdapterSection(kind="lora", rank=3)) == every


@pytest.mark.parametrize("tied", [True, False])
def test_modules_that_are_trained_whole_are_counted_once(tmp_path, tied):
    model = tiny("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    shape = shape_of(ModelSection(base_model=str(tmp_path)), "tokens")
    one = model.get_input_embeddings().weight.numel()
    low_rank = adapter_parameters(shape, AdapterSection(kind="lora", rank=3))
    for names, count in ((["lm_head"], 1), (["model.embed_tokens", "lm_head"], 1 if tied else 2)):
        adapter = AdapterSection(kind="lora", rank=3, modules_to_save=names)
        assert adapter_parameters(shape, adapter) == low_rank + count * one


def test_every_saving_saves(qwen):
    plain = need(qwen, "all", optimizer="adamw_torch_fused", reference=True, savings=Savings())
    assert need(qwen, "all", optimizer="adamw_torch_fused", savings=Savings()).total < plain.total
    assert need(qwen, "all", optimizer="adamw_torch_fused", reference=True).activations < plain.activations
    assert need(qwen, "lora").training < need(qwen, "all").training / 20
    four = AdapterSection(kind="qlora", load_in_4bit=True)
    eight = AdapterSection(kind="lora", load_in_8bit=True)
    weights = [need(qwen, way, adapter=a).weights for way, a in (("qlora", four), ("qlora", eight), ("lora", LORA))]
    assert weights == sorted(weights)
    assert optimizer_bytes("adamw_torch_4bit") < optimizer_bytes("adamw_torch_8bit")
    assert optimizer_bytes("adamw_bnb_8bit") < optimizer_bytes("lion_32bit") < optimizer_bytes("adamw_torch")


def test_the_longest_sequence_fits_and_one_more_half_does_not(qwen):
    fixed = need(qwen, "lora")
    most = longest(qwen, fixed, 21 * GIB, savings=RECOMPUTED, sequences=2)
    assert need(qwen, "lora", tokens=2 * most).total <= 21 * GIB
    assert need(qwen, "lora", tokens=3 * most).total > 21 * GIB
    assert longest(qwen, need(qwen, "all"), 8 * GIB, savings=RECOMPUTED, sequences=1) == 0


def test_a_token_of_a_mixture_takes_memory_for_each_of_its_experts():
    one, two = (TokenBytes.of(tiny("qwen3_moe", num_experts_per_tok=count).config).peak(Savings()) for count in (1, 2))
    layers, width, inner = 3, 32, 16
    kept = layers * (3 * inner + 2 * width)
    assert two - one == pytest.approx(2 * (kept + 3 * inner + 2 * width), rel=0.05)


def test_adapters_on_experts_and_experts_in_4_bits_are_counted(tmp_path):
    config = tiny("qwen3_moe", num_hidden_layers=2).config
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = shape_of(ModelSection(base_model=str(tmp_path)), "tokens")
    experts, width, inner, layers = 4, 32, 16, 2
    down, both = experts * (width + inner) * layers, experts * (width + inner + width + 2 * inner) * layers
    count = partial(adapter_parameters, shape)
    assert count(AdapterSection(rank=3, target_parameters="down_proj")) == 3 * down
    named = AdapterSection(rank=3, target_parameters=["experts.gate_up_proj", "mlp.experts.down_proj"])
    assert count(named) == 3 * both
    assert count(AdapterSection(rank=3, targets=["q_proj"])) == 3 * (width + 32) * layers
    assert count(AdapterSection(rank=3, targets=["q_proj"], target_parameters="down_proj")) == 3 * (64 * layers + down)
    assert count(AdapterSection(rank=3)) == count(AdapterSection(rank=3, target_linear=True)) == 1344  # attention
    weights = experts * 3 * width * inner * layers
    plain = weight_bytes(shape, AdapterSection(load_in_4bit=True))
    packed = weight_bytes(shape, AdapterSection(load_in_4bit=True, pack_experts=True))
    unpacked = 2 * experts * 2 * inner * width  # for the product of one layer
    assert plain - packed == pytest.approx((2 - 0.53) * weights - unpacked)


def test_a_reference_in_host_memory_and_a_smaller_head_are_counted(qwen):
    usual = need(qwen, "all", reference=True)
    away = need(qwen, "all", reference=True, savings=Savings(recompute=True, offload_reference=True))
    assert usual.training - away.training == 2 * qwen.parameters
    lean = need(qwen, "lora", tokens=256, savings=Savings(recompute=True, offload_activations=True, head_chunk=256))
    inputs = 2 * 2 * 1536  # of two layers; those of the others are in host memory
    assert lean.activations == 256 * 151_936 * 2 * 2 + 256 * inputs
    long = Savings(recompute=True, offload_activations=True)
    assert need(qwen, "lora", savings=long).activations < 0.75 * need(qwen, "lora").activations


def test_blocks_in_tiles_take_the_memory_of_one_tile(seven):
    tiled = replace(LEAN, tiled_above=4096)
    block = 4 * 18_944 * 2
    short, at, long = (need(seven, "lora", tokens=n, savings=tiled).activations for n in (2048, 4096, 40_960))
    assert (short, at) == tuple(need(seven, "lora", tokens=n, savings=LEAN).activations for n in (2048, 4096))
    assert need(seven, "lora", tokens=40_960, savings=LEAN).activations - long == (40_960 - 2048) * block
    for free in (1, 4, 40):
        most = seven.tokens_in(free * GIB, tiled)
        assert seven.activation_bytes(most, tiled) <= free * GIB < seven.activation_bytes(most + 64, tiled)
    assert seven.tokens_in(40 * GIB, tiled) > 2 * seven.tokens_in(40 * GIB, LEAN)


def test_a_model_without_gated_blocks_has_nothing_to_tile(tmp_path):
    shapes = []
    for kind in ("phi", "llama"):
        tiny(kind).save_pretrained(tmp_path / kind)
        shapes.append(shape_of(ModelSection(base_model=str(tmp_path / kind)), "tokens"))
    assert [bool(shape.token.block) for shape in shapes] == [False, True]


@pytest.mark.gpu
def test_a_limit_of_the_process_is_the_memory_that_there_is():
    device = torch.device("cuda", 0)
    whole = total_memory(device)
    try:
        torch.cuda.set_per_process_memory_fraction(0.25, device)
        assert total_memory(device) == pytest.approx(whole / 4, rel=0.01)
        held = torch.empty(whole // 8, dtype=torch.uint8, device=device)
        assert free_memory(device) <= whole / 8 + 2**20
        del held
        assert free_memory(device) == pytest.approx(whole / 4, rel=0.02)  # what is held unused counts as free
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_the_sampler_leaves_what_the_first_step_will_take():
    assert sampler_bytes(100, reserved=40) == 30
    assert sampler_bytes(10, reserved=40) == 0
    assert 0 < free_memory(torch.device("cpu")) <= total_memory(torch.device("cpu"))
