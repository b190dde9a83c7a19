"""Decoder layers in few launches compute what the model's own layers do, or are not taken."""

import pytest
import torch

from tiny_models import drawn, tiny
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.engine import Engine
from upweight.models.adapters.attach import attach_adapter
from upweight.models.load import load_model
from upweight.models.modules import replaced_forwards, unwrap_peft
from upweight.sampler.forward import CachedForward
from upweight.sampler.fused_decoder import FusedDecoder, fused_decoder
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling


def prepared(kind: str, **changes) -> CachedForward:
    model = tiny(kind, **changes).eval()
    Engine(model)
    return CachedForward(model, model.device)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_usual_layers_are_taken_and_compute_the_same(kind: str):
    forward = prepared(kind)
    with torch.no_grad():
        layers = fused_decoder(forward)
        assert len(layers) == len(forward.layers)
        ids_1N = torch.from_numpy(drawn(0, 9))[None]

        def attend(call, query, key, value, params):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=params.scaling, enable_gqa=True
            )

        right, found = [], []
        for logits, replaced in ((right, {}), (found, layers)):
            with replaced_forwards(replaced):
                logits.append(forward.logits(ids_1N, torch.arange(9)[None] * 3, attend, None))
    torch.testing.assert_close(found[0], right[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_other_layers_are_not_taken(kind: str):
    with torch.no_grad():
        assert fused_decoder(prepared(kind)) == {}


def test_layers_with_another_residual_have_other_logits_and_are_not_taken():
    with torch.no_grad():
        assert fused_decoder(prepared("granite", residual_multiplier=0.3)) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [None, "lora", "qlora"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_sampling_by_kernels_has_the_log_probs_of_the_model(kind: str, adapter: str | None, monkeypatch, tmp_path):
    used = []
    call = FusedDecoder.__call__
    monkeypatch.setattr(FusedDecoder, "__call__", lambda *args, **kwargs: used.append(1) or call(*args, **kwargs))
    model = tiny(kind, hidden_size=64, intermediate_size=96).bfloat16().cuda().requires_grad_(False)
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
        model.save_pretrained(tmp_path)
        section = AdapterSection(kind="qlora", load_in_4bit=True)
        model = load_model(ModelSection(base_model=str(tmp_path)), torch.bfloat16, adapter=section)
    if adapter is not None:
        model = attach_adapter(model, AdapterSection(kind="lora", rank=4, alpha=8, target_linear=True)).bfloat16()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    sampler = InProcess(model, end_ids=(), compile=True)
    prompts = [drawn(1, 9).tolist(), drawn(2, 150).tolist(), drawn(3, 1).tolist()]
    for count in (2, 40):  # few rows, and many
        completions = sampler.generate(prompts, count, Sampling(max_new_tokens=20, seed=1))
        for prompt, group in zip(prompts, completions, strict=True):
            ids_BN = torch.tensor([prompt + one.ids for one in group], device="cuda")
            with torch.no_grad():
                logits_BNV = unwrap_peft(model)(input_ids=ids_BN).logits[:, len(prompt) - 1 : -1].float()
            right_BN = logits_BNV.log_softmax(-1).gather(2, ids_BN[:, len(prompt) :, None])[:, :, 0].cpu()
            found_BN = torch.tensor([one.logps for one in group])
            assert (found_BN - right_BN).abs().mean() < 0.15
    assert sampler.shares_prefixes
    assert used
