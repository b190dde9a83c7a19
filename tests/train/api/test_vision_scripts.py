"""Scripts on images as TRL's own tests have them: models, methods, text alone, LoRA, KL."""

import pytest
import torch

pytest.importorskip("PIL")

from datasets import Dataset
from peft import LoraConfig

import upweight
from light_rewards import checksum_of_images
from slow_cases import slow_except
from tiny_vision import KINDS, drawn_image, processor, vision_model

COMMON = {
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "learning_rate": 0.1,
    "per_device_train_batch_size": 3, "max_steps": 2,
}  # fmt: skip
ONLINE = {"num_generations": 3, "max_completion_length": 8}


def said(role, text):
    return [{"role": role, "content": text}]


def rows(kind, shown="one"):
    """Rows of a kind: with one image, in a column of one, or with one to three."""
    made = []
    for number in range(6):
        drawn = [drawn_image(10 * number + place) for place in range(1 + number % 3)]
        row = {"one": {"images": drawn[:1]}, "column": {"image": drawn[0]}, "several": {"images": drawn}}[shown]
        prompt, answer = said("user", "What is in the image?"), said("assistant", f"It is {number}.")
        row |= {
            "messages": {"messages": prompt + answer},
            "completions": {"prompt": prompt, "completion": answer},
            "pairs": {"prompt": prompt, "chosen": answer, "rejected": said("assistant", "No.")},
            "labelled": {"prompt": prompt, "completion": answer, "label": number % 2 == 0},
            "prompts": {"prompt": prompt},
            "text": {"text": f"It is {number}."},
            "plain": {"prompt": "Which number?", "completion": f" {number}."},
            "plain pairs": {"prompt": "Which number?", "chosen": f" {number}.", "rejected": " No."},
        }[kind]
        made.append(row)
    return Dataset.from_list(made)


def trained(trainer, kind, model_kind, folder, *, data=None, shown="one", lora=False, frozen=False, **config):
    """Train by a script; return the trainer. Every weight that trains has changed, the vision tower's too."""
    model = vision_model(model_kind)
    args = getattr(upweight, f"{trainer}Config")(output_dir=str(folder), **COMMON | config)
    given = {"train_dataset": rows(kind, shown) if data is None else data, "processing_class": processor(model_kind)}
    if trainer in ("GRPO", "RLOO"):
        given["reward_funcs"] = checksum_of_images
    if lora:
        targets = r".*(language_model|text_model).*\.(q_proj|v_proj)"
        given["peft_config"] = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    made = getattr(upweight, f"{trainer}Trainer")(model, args=args, **given)
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters() if weight.requires_grad}
    made.train()
    assert made.state.log_history[-1]["train_loss"] is not None
    same = [
        name for name, weight in made.model.named_parameters() if name in before and torch.equal(weight, before[name])
    ]
    towers = ("vision", "visual", "projector", "connector", "image_newline")
    # Nothing reads what CLIP's tower ends in: features are those of its last layer.
    unread = ("post_layernorm", *(towers if frozen else ()))
    assert before
    assert not lora or all("lora" in name for name in before)
    assert not [name for name in same if "bias" not in name and not any(part in name for part in unread)]
    return made


CASES = {
    **{f"sft {kind}": ("SFT", "messages", kind, {}) for kind in KINDS},
    **{f"dpo {kind}": ("DPO", "pairs", kind, {}) for kind in KINDS},
    **{f"grpo {kind}": ("GRPO", "prompts", kind, ONLINE) for kind in KINDS},
    **{f"rloo {kind}": ("RLOO", "prompts", kind, ONLINE) for kind in ("qwen2_5_vl", "gemma3", "idefics3")},
    **{f"kto {kind}": ("KTO", "labelled", kind, {}) for kind in ("qwen2_5_vl", "llava_next")},
    "sft completions": ("SFT", "completions", "qwen2_5_vl", {}),
    "sft lora": ("SFT", "messages", "qwen2_5_vl", {"lora": True}),
    "sft checkpointing": ("SFT", "messages", "llava", {"gradient_checkpointing": True}),
    "dpo lora": ("DPO", "pairs", "gemma3", {"lora": True}),
    "dpo ipo": ("DPO", "pairs", "qwen3_vl", {"loss_type": "ipo"}),
    "grpo beta": ("GRPO", "prompts", "qwen2_5_vl", {"beta": 0.1, **ONLINE}),
    **{
        f"{name} {shown}": (trainer, kind, model, {"shown": shown, **options})
        for shown in ("several", "column")
        for name, trainer, kind, model, options in (
            ("sft", "SFT", "messages", "smolvlm", {}),
            ("sft completions", "SFT", "completions", "gemma3", {}),
            ("dpo", "DPO", "pairs", "idefics3", {}),
            ("kto", "KTO", "labelled", "llava", {}),
            ("grpo", "GRPO", "prompts", "qwen3_vl", ONLINE),
            ("rloo", "RLOO", "prompts", "llava_next", ONLINE),
        )
    },
    "grpo lora": ("GRPO", "prompts", "gemma3", {"lora": True, **ONLINE}),
    "grpo iterations": ("GRPO", "prompts", "qwen2_5_vl", {"num_iterations": 2, **ONLINE}),
    "grpo sequences": ("GRPO", "prompts", "llava", {"importance_sampling_level": "sequence", **ONLINE}),
    "grpo liger": ("GRPO", "prompts", "qwen2_5_vl", {"use_liger_kernel": True, **ONLINE}),
    "grpo checkpointing": ("GRPO", "prompts", "idefics3", {"gradient_checkpointing": True, **ONLINE}),
    "rloo lora": ("RLOO", "prompts", "qwen2_5_vl", {"lora": True, **ONLINE}),
    "rloo beta": ("RLOO", "prompts", "qwen2_5_vl", {"beta": 0.1, **ONLINE}),
    "kto lora": ("KTO", "labelled", "qwen2_5_vl", {"lora": True}),
    "dpo hinge": ("DPO", "pairs", "internvl", {"loss_type": "hinge"}),
    "sft accumulated": ("SFT", "messages", "qwen3_vl", {"gradient_accumulation_steps": 2}),
}
OFTEN = ("sft lora", "grpo mistral3", "grpo beta", "dpo qwen2_5_vl", "sft completions several", "rloo column")
TEXTS = {
    "messages": ("SFT", {}), "completions": ("SFT", {}), "text": ("SFT", {}), "plain": ("SFT", {}),
    "pairs": ("DPO", {}), "plain pairs": ("DPO", {}), "labelled": ("KTO", {}), "prompts": ("GRPO", ONLINE),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(OFTEN, CASES))
def test_scripts_train_on_images(name, tmp_path):
    trainer, kind, model, options = CASES[name]
    trained(trainer, kind, model, tmp_path, **options)


@pytest.mark.parametrize("model", ["gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize("kind", slow_except(("plain",), TEXTS))
def test_a_vision_model_trains_on_text_alone_and_its_tower_stays(kind, model, tmp_path):
    trainer, options = TEXTS[kind]
    data = rows(kind).remove_columns("images")
    made = trained(trainer, kind, model, tmp_path, data=data, frozen=True, **options)
    before, after = vision_model(model).state_dict(), made.model.state_dict()
    towers = [name for name in before if "vision_tower" in name or "visual" in name]
    assert towers
    assert all(torch.equal(before[name], after[name]) for name in towers)


@pytest.mark.parametrize("trainer", slow_except(("SFT",), ["SFT", "DPO", "GRPO"]))
def test_rows_for_evaluation_have_images_too(trainer, tmp_path):
    kind, options = {"SFT": ("messages", {}), "DPO": ("pairs", {}), "GRPO": ("prompts", ONLINE)}[trainer]
    args = getattr(upweight, f"{trainer}Config")(
        output_dir=str(tmp_path), **COMMON | options, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3
    )
    given = {"train_dataset": rows(kind), "eval_dataset": rows(kind, "several"), "processing_class": processor("llava")}
    given |= {"reward_funcs": checksum_of_images} if trainer == "GRPO" else {}
    made = getattr(upweight, f"{trainer}Trainer")(vision_model("llava"), args=args, **given)
    made.train()
    logged = [line for line in made.state.log_history if any(name.startswith("eval_") for name in line)]
    assert len(logged) == 1
    assert "eval_reward" in logged[0] if trainer == "GRPO" else "eval_loss" in logged[0]
