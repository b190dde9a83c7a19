"""One script, run with TRL or with Upweight in its place: tiny model, few rows, SGD; losses and gradient norms out.

    python parity_script.py trl|upweight [case ...]

prints one JSON line for each case. It imports nothing of the other library, so that each runs in its own environment.
"""

import hashlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from parity_grpo import GRPO_CASES, GRPO_DIFFERENT, replaying

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPACE, NEWLINE = "\u0120", "\u010a"  # as byte-level tokenizers write them
LOUD = TEMPLATE.replace("message['role'] +", "message['role'] | upper +")
WITH_NEWLINES = TEMPLATE.replace("<|im_end|>' }}", "<|im_end|>\\n' }}")
QUESTIONS = ("Why?", "How many?", "What is red?", "Who was it?", "Name a fish.", "And then?", "1 + 2?", "Go on.")
GOOD = ("As it rains.", "Three.", "A ripe apple", "My aunt Ada", "Cod", "They slept well.", "3", "So he went home")
BAD = ("No.", "Many of them!", "Blue", "Nobody", "A cow, maybe", "?", "It is five", "I will not")


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


ROWS: dict[str, list[dict[str, Any]]] = {
    "pairs": [
        {"prompt": question, "chosen": f" {good}", "rejected": f" {bad}"}
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
    "message pairs": [
        {"prompt": said("user", question), "chosen": said("assistant", good), "rejected": said("assistant", bad)}
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
    "whole message pairs": [
        {side: said("user", question) + said("assistant", answer) for side, answer in answers.items()}
        for question, *both in zip(QUESTIONS, GOOD, BAD, strict=True)
        for answers in [dict(zip(("chosen", "rejected"), both, strict=True))]
    ],
    "spaced pairs": [
        {"prompt": f"{question} ", "chosen": good, "rejected": bad}
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
    "broken pairs": [
        {"prompt": f"{question}\n", "chosen": f"\n{good}", "rejected": f"\n{bad}"}
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
    "spaced labelled": [
        {"prompt": f"{question} ", "completion": good if number % 3 else bad, "label": bool(number % 3)}
        for number, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True))
    ],
    "spaced completions": [
        {"prompt": f"{question} ", "completion": good} for question, good in zip(QUESTIONS, GOOD, strict=True)
    ],
    "labelled": [
        {"prompt": question, "completion": f" {good if number % 3 else bad}", "label": bool(number % 3)}
        for number, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True))
    ],
    "margins": [
        {"chosen": f"{question} {good}", "rejected": f"{question} {bad}", "margin": 0.1 * number}
        for number, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True))
    ],
    "joined": [
        {"chosen": f"{question} Many {good}", "rejected": f"{question} May {bad}"}
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
    "steps": [
        {
            "prompt": f"{question}\n",
            "completions": [good, bad, good][: 1 + number % 3],
            "labels": [number % 2 == 0, number % 3 == 0, True][: 1 + number % 3],
        }
        for number, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True))
    ],
    "prompts": [{"prompt": question} for question in QUESTIONS],
    "text": [{"text": f"{question} {good}"} for question, good in zip(QUESTIONS, GOOD, strict=True)],
    "completions": [
        {"prompt": question, "completion": f" {good}"} for question, good in zip(QUESTIONS, GOOD, strict=True)
    ],
    "messages": [
        {"messages": said("user", question) + said("assistant", good) + said("user", "Sure?") + said("assistant", bad)}
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
    "talks": [
        {
            "prompt": said("user", "Hi!") + said("assistant", "Hello.") + said("user", question),
            "completion": said("assistant", good) + said("user", "Sure?") + said("assistant", bad),
        }
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ],
}  # fmt: skip


def case(trainer: str, rows: str, **options: Any) -> dict[str, Any]:
    """`lora`, what tokenizer (see `made_tokenizer`); the rest is the trainer's config."""
    own = {"lora": False, "bos": "", "template": TEMPLATE, "merges": False}
    chosen = {name: options.pop(name, default) for name, default in own.items()}
    return {"trainer": trainer, "rows": rows, "config": options, **chosen}


def dpo(**config: Any) -> dict[str, Any]:
    return case("DPO", "pairs", **config)


CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
PLAIN = (
    "sigmoid", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
GENTLE = {"discopop": {"learning_rate": 0.005}}  # its gate is so steep that larger steps amplify rounding
SMOOTHED = ("robust", "aot", "aot_unpaired")
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
CASES: dict[str, dict[str, Any]] = {
    **{f"dpo {name}": dpo(loss_type=[name], **GENTLE.get(name, {})) for name in PLAIN},
    **{
        f"dpo {name}, cut": dpo(loss_type=[name], **CUT, **GENTLE.get(name, {}))
        for name in PLAIN
        if name not in ("aot", "aot_unpaired", "sft")
    },
    **{f"dpo {name}, smoothed": dpo(loss_type=[name], label_smoothing=0.1) for name in SMOOTHED},
    "dpo exo_pair": dpo(loss_type=["exo_pair"], label_smoothing=0.01),
    "dpo exo_pair, cut": dpo(loss_type=["exo_pair"], label_smoothing=0.01, **CUT),
    "dpo weights": dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "dpo beta": dpo(beta=0.5),
    **{f"dpo {name}": dpo(f_divergence_type=name) for name in DIVERGENCES},
    "dpo ipo, js_divergence": dpo(loss_type=["ipo"], f_divergence_type="js_divergence"),
    "dpo ld_alpha": dpo(ld_alpha=0.3),
    "dpo weighting": dpo(use_weighting=True),
    "dpo precomputed": dpo(precompute_ref_log_probs=True, **CUT),
    "dpo synced": dpo(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6),
    "dpo truncated": dpo(max_length=20),
    "dpo lora": dpo(lora=True),
    "dpo lora, cut": dpo(lora=True, **CUT),
    "dpo messages": case("DPO", "message pairs"),
    "dpo implicit prompt": case("DPO", "whole message pairs"),
    "dpo implicit text prompt": case("DPO", "joined"),
    "dpo bos": dpo(bos="written"),
    "sft text, bos": case("SFT", "text", bos="written"),
    "orpo, bos": case("ORPO", "pairs", bos="written"),
    "kto, bos": case("KTO", "labelled", bos="written"),
    "reward, bos": case("Reward", "pairs", bos="written"),
    "sft text": case("SFT", "text"),
    "sft text, cut": case("SFT", "text", **CUT),
    "sft truncated": case("SFT", "text", max_length=16),
    "sft completions": case("SFT", "completions"),
    "sft completions, cut": case("SFT", "completions", **CUT),
    "sft prompts too": case("SFT", "completions", completion_only_loss=False),
    "sft messages": case("SFT", "messages"),
    "sft assistant": case("SFT", "messages", assistant_only_loss=True, **CUT),
    "sft dft": case("SFT", "completions", loss_type="dft"),
    "sft lora": case("SFT", "completions", lora=True),
    "sft assistant of completions": case("SFT", "talks", assistant_only_loss=True),
    "sft assistant everywhere": case("SFT", "talks", assistant_only_loss=True, completion_only_loss=False),
    "sft masked ids": case("SFT", "masked ids"),
    "sft masked ids, completions": case("SFT", "masked ids", completion_only_loss=True),
    "sft template of a file": case("SFT", "messages", chat_template_path="loud.jinja"),
    "reward template of a file": case("Reward", "message pairs", chat_template_path="loud.jinja"),
    "sft merged": case("SFT", "spaced completions", merges=True),
    "dpo merged": case("DPO", "spaced pairs", merges=True),
    "dpo merged newlines": case("DPO", "broken pairs", merges=True),
    "kto merged": case("KTO", "spaced labelled", merges=True),
    "orpo merged newlines": case("ORPO", "broken pairs", merges=True),
    "cpo merged newlines": case("CPO", "broken pairs", merges=True),
    "reward merged": case("Reward", "spaced pairs", merges=True),
    "reward ids": case("Reward", "reward ids"),
    "dpo named bos": dpo(bos="named"),
    "kto, named bos": case("KTO", "labelled", bos="named"),
    "kto": case("KTO", "labelled"),
    "kto other order": case("KTO", "labelled backwards", beta=2.0),
    "kto uneven batches": case("KTO", "labelled", beta=2.0, per_device_train_batch_size=5),
    "kto weights": case("KTO", "labelled", desirable_weight=1.5, undesirable_weight=0.5, beta=0.3),
    "kto apo_zero_unpaired": case("KTO", "labelled", loss_type="apo_zero_unpaired", **CUT),
    "orpo": case("ORPO", "pairs"),
    "orpo beta": case("ORPO", "pairs", beta=0.5),
    "cpo sigmoid": case("CPO", "pairs"),
    "cpo smoothed": case("CPO", "pairs", label_smoothing=0.1),
    "cpo hinge": case("CPO", "pairs", loss_type="hinge"),
    "cpo ipo": case("CPO", "pairs", loss_type="ipo"),
    "simpo": case("CPO", "pairs", loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.5, beta=2.0),
    "alphapo": case("CPO", "pairs", loss_type="simpo", cpo_alpha=0.0, alpha=0.25, beta=2.0),
    "simpo with likelihood": case("CPO", "pairs", loss_type="simpo", beta=2.0),
    "reward": case("Reward", "pairs"),
    "reward margins": case("Reward", "margins", center_rewards_coefficient=0.01, **CUT),
    **GRPO_CASES,
}  # fmt: skip
# The last TRL that had it is 1.10: its folder on PYTHONPATH comes before a later one.
PRM_CASES: dict[str, dict[str, Any]] = {
    "prm": case("PRM", "steps"),
    "prm last step": case("PRM", "steps", train_on_last_step_only=True),
    "prm separator, bos": case("PRM", "steps", step_separator=" <step>", bos="written"),
    "prm truncated": case("PRM", "steps", max_length=30, max_completion_length=20),
    "prm lora": case("PRM", "steps", lora=True),
}
PRM_DIFFERENT: dict[str, dict[str, Any]] = {"prm, cut": case("PRM", "steps", **CUT)}
# Where the numbers differ on purpose; docs/differences.md says why.
DIFFERENT: dict[str, dict[str, Any]] = {
    "dpo sigmoid, smoothed": dpo(label_smoothing=0.1),
    "dpo sigmoid_norm, smoothed": dpo(loss_type=["sigmoid_norm"], label_smoothing=0.1),
    "dpo sft, cut": dpo(loss_type=["sft"], **CUT),
    "dpo aot_unpaired, cut": dpo(loss_type=["aot_unpaired"], beta=1.0, **CUT),
    "dpo ipo, prompt cut inside a word": case("DPO", "joined", loss_type=["ipo"]),
    "kto, cut": case("KTO", "labelled", beta=2.0, **CUT),
    "orpo, cut": case("ORPO", "pairs", **CUT),
    "cpo, cut": case("CPO", "pairs", **CUT),
    "sft newlines": case("SFT", "messages", template=WITH_NEWLINES),
    "sft messages, bos": case("SFT", "messages", bos="written"),
    "orpo merged": case("ORPO", "spaced pairs", merges=True),
    "cpo merged": case("CPO", "spaced pairs", merges=True),
    "simpo merged": case("CPO", "spaced pairs", loss_type="simpo", cpo_alpha=0.0, beta=2.0, merges=True),
    "orpo, named bos": case("ORPO", "pairs", bos="named"),
    "cpo, named bos": case("CPO", "pairs", bos="named"),
    **GRPO_DIFFERENT,
}


def made_tokenizer(template: str, bos: str = "", *, merges: bool = False) -> PreTrainedTokenizerFast:
    """Every byte is a token; nothing is learned, so that no version of any library changes it.

    `bos`: "written" at the start of texts, or only "named". `merges`: of white space with some of what follows it.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [(SPACE, letter) for letter in "ACMNT3"] + [(NEWLINE, NEWLINE), ("?", SPACE)] if merges else []
    pieces += [first + second for first, second in merged]
    backend = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merged))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<s>")
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    if bos == "written":
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tokenised(messages: list[dict[str, str]], first: int) -> dict[str, list[int]]:
    """A conversation as token ids; the assistant's turns and, from the `first` on, the completion are masked in."""
    tokenizer = made_tokenizer(TEMPLATE)
    whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    before = tokenizer.apply_chat_template(messages[:first], return_dict=True)["input_ids"]
    completion = [int(number >= len(before)) for number in range(len(whole["input_ids"]))]
    masks = {"assistant_masks": whole["assistant_masks"], "completion_mask": completion}
    return {"input_ids": whole["input_ids"], **masks}


ROWS["labelled backwards"] = ROWS["labelled"][::-1]
ROWS["masked ids"] = [tokenised(row["messages"], 3) for row in ROWS["messages"]]
ROWS["reward ids"] = [
    {f"{side}_ids": made_tokenizer(TEMPLATE)(row["prompt"] + row[side])["input_ids"] for side in ("chosen", "rejected")}
    for row in ROWS["pairs"]
]


def fill(model: torch.nn.Module, only: str = "") -> None:
    """Weights that depend on their names alone; `only` those whose name contains a word."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if only in name and weight.ndim > 1:
                last = ".".join(part for part in name.split(".") if part not in ("base_model", "default"))[-40:]
                seed = int.from_bytes(hashlib.sha256(last.encode()).digest()[:4], "big")
                weight.copy_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


HEADS = {"Reward": (Qwen2ForSequenceClassification, 1), "PRM": (Qwen2ForTokenClassification, 2)}


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, trainer: str, hidden_size: int = 32) -> None:
    head, labels = HEADS.get(trainer, (Qwen2ForCausalLM, 1))
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, attention_dropout=0.0, num_labels=labels,
    )  # fmt: skip
    model = head(config)
    fill(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def classes(library: str, trainer: str) -> tuple[Any, Any]:
    experimental = library == "trl" and trainer in ("ORPO", "CPO", "PRM")
    module = importlib.import_module(f"trl.experimental.{trainer.lower()}" if experimental else library)
    return getattr(module, f"{trainer}Config"), getattr(module, f"{trainer}Trainer")


def run(library: str, case: dict[str, Any], folder: Path, epochs: int = 2) -> dict[str, list[float]]:
    """Loss and gradient norm of each step of a case."""
    tokenizer = made_tokenizer(case.get("template", TEMPLATE), case.get("bos", ""), merges=case.get("merges", False))
    write_model(folder / "model", tokenizer, case["trainer"])
    config_class, trainer_class = classes(library, case["trainer"])
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": epochs, "learning_rate": 0.05, "optim": "sgd",
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 0,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    settings |= case["config"] | (case.get("ours", {}) if library == "upweight" else {})
    if "chat_template_path" in settings:
        settings["chat_template_path"] = str(folder / settings["chat_template_path"])
        Path(settings["chat_template_path"]).write_text(LOUD)
    args = config_class(output_dir=str(folder / "out"), **settings)
    adapter = None
    if case["lora"]:
        from peft import LoraConfig

        kind = "TOKEN_CLS" if case["trainer"] == "PRM" else "CAUSAL_LM"
        adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=kind)
    online = replaying(case, tokenizer.eos_token_id) if case["trainer"] in ("GRPO", "RLOO") else {}
    replay = online.pop("rollout_func") if (library, case["trainer"]) == ("trl", "RLOO") else None
    trainer = trainer_class(
        # TRL's PRMTrainer takes no path
        model=Qwen2ForTokenClassification.from_pretrained(folder / "model")
        if case["trainer"] == "PRM"
        else str(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list(ROWS[case["rows"]]),
        processing_class=tokenizer,
        peft_config=adapter,
        **online,
    )
    if replay is not None:  # TRL's RLOOTrainer takes no rollout_func
        trainer._tokenize_prompts = lambda prompts: ([list(prompt.encode()) for prompt in prompts], None, {})
        trainer._generate_single_turn = lambda ids, *_: replay([""] * len(ids), trainer)["completion_ids"]
    fill(trainer.model, only="lora_A")
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [float(step[name]) for step in steps] for name in ("loss", "grad_norm")}


def main() -> None:
    library, *names = sys.argv[1:]
    torch.set_num_threads(1)
    known = CASES | DIFFERENT | PRM_CASES | PRM_DIFFERENT
    for name in names or CASES | DIFFERENT:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps({"case": name, **run(library, known[name], Path(temporary))}), flush=True)


if __name__ == "__main__":
    main()
