import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tiny_models import tiny
from upweight.config.sections.model import AdapterSection
from upweight.errors import UserError
from upweight.models.adapters.attach import attach_adapter, linear_names, lora_config, new_adapter
from upweight.settings import setting

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def section(**settings) -> AdapterSection:
    return AdapterSection(kind="lora", **settings)


def adapted_names(model: PeftModel) -> set[str]:
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_modules() if name.endswith("lora_A")}


def trained_names(model: PeftModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_a_new_key_with_the_name_of_an_option_of_peft_needs_its_declaration_only():
    class WithKeys(AdapterSection):
        with_bias: bool = setting("lora_bias", False, "PEFT has an option of this name, and `bias`.")
        excluded: list[str] | None = setting("peft_exclude_modules", None, "Named `exclude_modules` in PEFT.")

    config = lora_config(tiny("llama"), WithKeys(kind="lora", with_bias=True, excluded=["q_proj"]))
    assert (config.lora_bias, config.bias, config.exclude_modules) == (True, "none", {"q_proj"})


@pytest.mark.parametrize("settings", [{"target_linear": True}, {}])
def test_every_linear_layer_but_the_head_is_adapted(settings):
    model = attach_adapter(tiny("llama"), section(**settings))
    assert adapted_names(model) == set(LINEAR)
    assert all("lora_" in name for name in trained_names(model))


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_score_head_is_not_adapted_but_trained(auto):
    model = attach_adapter(tiny("llama", auto=auto), section(target_linear=True))
    assert adapted_names(model) == set(LINEAR)
    assert any("score.modules_to_save" in name for name in trained_names(model))


def test_layers_before_the_score_are_trained_and_saved_with_it():
    model = attach_adapter(tiny("modernbert-decoder", auto=AutoModelForSequenceClassification), section())
    assert "dense" not in adapted_names(model)
    assert any("head.modules_to_save" in name and "dense" in name for name in trained_names(model))


def test_what_peft_does_not_take_is_a_message():
    with pytest.raises(UserError, match=r"adapter: PEFT does not take these options: .* even"):
        attach_adapter(tiny("llama"), section(target_linear=True, rank=3, init="orthogonal"))


def test_settings_reach_peft():
    config = lora_config(
        tiny("llama"),
        section(
            rank=4,
            alpha=12,
            dropout=0.1,
            targets=["q_proj", "down_proj"],
            modules_to_save=["lm_head"],
            rank_pattern={"down_proj": 2},
            alpha_pattern={"down_proj": 6},
            rslora=True,
            init="gaussian",
            layers=[0, 2],
            layers_pattern=["layers"],
        ),
    )
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 12, 0.1)
    assert config.target_modules == {"q_proj", "down_proj"}
    assert config.modules_to_save == ["lm_head"]
    assert (config.rank_pattern, config.alpha_pattern) == ({"down_proj": 2}, {"down_proj": 6})
    assert config.use_rslora
    assert config.init_lora_weights == "gaussian"
    assert config.layers_to_transform == [0, 2]


def test_ranks_layers_and_dora_take_effect():
    model = attach_adapter(
        tiny("llama"), section(rank=4, targets=["q_proj", "o_proj"], rank_pattern={"o_proj": 2}, layers=[1], dora=True)
    )
    ranks = {name.split(".")[-4]: p.shape[0] for name, p in model.named_parameters() if "lora_A" in name}
    assert ranks == {"q_proj": 4, "o_proj": 2}
    assert all(".layers.1." in name for name in trained_names(model))
    assert any("magnitude" in name for name in trained_names(model))


def test_targets_may_be_a_pattern_or_one_name():
    pattern = attach_adapter(tiny("llama"), section(targets=r".*layers\.0\..*(q|v)_proj"))
    assert adapted_names(pattern) == {"q_proj", "v_proj"}
    assert adapted_names(attach_adapter(tiny("llama"), section(targets="q_proj"))) == {"q_proj"}


def test_all_linear_layers_and_named_targets_add_up():
    model = attach_adapter(tiny("llama"), section(targets=["embed_tokens"], target_linear=True))
    assert adapted_names(model) == set(LINEAR) | {"embed_tokens"}


def test_expert_weights_are_adapted_as_parameters():
    model = attach_adapter(tiny("qwen3_moe"), section(target_parameters=["experts.gate_up_proj"]))
    assert {name.split(".")[-4] for name in trained_names(model)} == {"experts"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": ["q_proj", "v_prjo"]},
            "lora_target_modules: 'v_prjo' matches nothing.*mean 'v_proj'.*q_proj, k_proj",
        ),
        ({"targets": "nothing.*"}, "lora_target_modules: 'nothing.*' matches nothing"),
        ({"modules_to_save": ["lm_haed"]}, "lora_modules_to_save: 'lm_haed' .*mean 'lm_head'"),
        ({"target_parameters": ["experts.up"]}, "lora_target_parameters: 'experts.up' matches nothing"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error_that_names_what_there_is(settings, message):
    with pytest.raises(UserError, match=message):
        attach_adapter(tiny("llama"), section(**settings))


def test_tied_embeddings_trained_in_full_stay_tied():
    model = attach_adapter(tiny("llama", tie_word_embeddings=True), section(modules_to_save=["embed_tokens"]))
    base = model.get_base_model()
    head = base.lm_head.modules_to_save["default"].weight
    assert head is base.model.embed_tokens.modules_to_save["default"].weight


def test_linear_layers_of_other_architectures_are_found():
    assert linear_names(tiny("phi3")) == ["o_proj", "qkv_proj", "gate_up_proj", "down_proj"]


def test_names_that_other_modules_have_too_are_longer():
    pytest.importorskip("PIL")
    from tiny_vision import vision_model

    adapted = attach_adapter(vision_model("qwen2_5_vl"), section(target_linear=True, rank=2))
    names = {name.partition(".lora_A")[0].rpartition("visual.")[2] for name, _ in adapted.named_parameters()}
    assert {"merger.mlp.0", "merger.mlp.2", "blocks.0.attn.qkv", "blocks.0.attn.proj"} <= names
    assert "patch_embed.proj" not in names


def test_an_adapter_folder_is_continued_exactly(tmp_path):
    first = attach_adapter(tiny("llama"), section(targets=["q_proj"], rank=3))
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    first.save_pretrained(tmp_path)
    again = attach_adapter(tiny("llama").to(torch.bfloat16), section(folder=str(tmp_path), rank=16))
    assert again.peft_config["default"].r == 3
    saved = {name: p for name, p in first.named_parameters() if p.requires_grad}
    assert trained_names(again) == saved.keys()
    for name, parameter in again.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, saved[name])


def test_a_folder_without_a_fitting_adapter_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"lora_model_dir: .* holds no adapter_config\.json"):
        attach_adapter(tiny("llama"), section(folder=str(tmp_path)))
    attach_adapter(tiny("llama"), section(targets=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not fit this base model"):
        attach_adapter(tiny("llama", hidden_size=16), section(folder=str(tmp_path)))
    with pytest.raises(UserError, match=r"lora_model_dir: no adapter at"):
        attach_adapter(tiny("llama"), section(folder=str(tmp_path / "missing")))


def test_new_tokens_without_trained_embeddings_are_told(caplog):
    attach_adapter(tiny("llama"), section(targets=["q_proj"]), new_tokens=2)
    assert "embed_tokens, lm_head" in caplog.text
    caplog.clear()
    attach_adapter(tiny("llama"), section(modules_to_save=["embed_tokens", "lm_head"]), new_tokens=3)
    assert not caplog.text


def test_routers_are_not_adapted_unless_they_are_named(caplog):
    with caplog.at_level("INFO", "upweight"):
        model = attach_adapter(tiny("llama4_text", moe_layers=[0, 1]), section())
    assert "router" not in adapted_names(model)
    assert "stay as they are" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "upweight"):
        attach_adapter(tiny("qwen3_moe"), section(target_parameters=["mlp.gate.weight"]))
    assert "stay as they are" not in caplog.text


def test_names_that_peft_takes_for_routed_experts_are_left_out_or_refused(caplog):
    model = attach_adapter(tiny("glm4_moe"), section())
    assert adapted_names(model) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any("experts" in name for name in trained_names(model))
    assert "gate_proj, up_proj, down_proj of Glm4MoeForCausalLM are not adapted" in caplog.text
    with pytest.raises(UserError, match="PEFT takes gate_proj, up_proj of Glm4MoeForCausalLM for its routed experts"):
        attach_adapter(tiny("glm4_moe"), section(targets=["q_proj", "gate_proj", "up_proj"]))
    with pytest.raises(UserError, match=r"'gate_proj' matches nothing.*Experts are one weight for a layer"):
        attach_adapter(tiny("qwen3_moe"), section(targets=["gate_proj", "up_proj"]))


def test_a_pattern_keeps_its_layers_on_mixtures_too():
    model = attach_adapter(tiny("qwen3_moe"), section(targets=r".*layers\.1\..*q_proj"))
    assert trained_names(model)
    assert all(".layers.1." in name for name in trained_names(model))


def test_chosen_layers_hold_for_experts_too():
    model = attach_adapter(tiny("qwen3_moe"), section(target_parameters=["experts.down_proj"], layers=[2]))
    assert trained_names(model)
    assert all(".layers.2." in name for name in trained_names(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": "all-linear"}, "'all-linear' also takes the router"),
        ({"target_parameters": ["experts.down_proj"], "layers_to_transform": [0]}, "PEFT ignores layers_to_transform"),
        ({"target_parameters": ["experts.down_proj"], "exclude_modules": ["x"]}, "PEFT ignores exclude_modules"),
    ],
)
def test_what_peft_does_in_silence_to_experts_is_refused_in_scripts(options, message):
    with pytest.raises(UserError, match=message):
        new_adapter(tiny("qwen3_moe"), LoraConfig(r=4, **options))


def test_former_names_of_experts_in_scripts_are_explained(caplog):
    model = new_adapter(tiny("qwen3_moe"), LoraConfig(r=4, target_modules=["gate_proj", "up_proj"]))
    ranks = {p.shape[0] // 4 for name, p in model.named_parameters() if "experts" in name and "lora_A" in name}
    assert ranks == {8}
    assert "fused ones at twice the rank" in caplog.text
