"""Examples made small: a few rows in the form of the datasets that they name, and a tiny model."""

import json
import shutil
import sys
from pathlib import Path

import yaml

from made_runs import write_model
from made_tokenizers import byte_tokenizer
from upweight.config import load_config
from upweight.train.run import train
from upweight.train.stages import train_stages

TEMPLATE = """{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
EXAMPLES = Path(__file__).parent.parent / "examples"


def turns(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]


def rows_in_the_form_of(path):
    """A few rows with the columns of a dataset that examples name."""
    many = range(12)
    conversations = [
        {"prompt": f"say {n}", "chosen": turns(f"say {n}", f"yes {n}"), "rejected": turns(f"say {n}", f"no, not {n}")}
        for n in many
    ]
    sums = [{"prompt": turns(f"What is {n} + 1?"), "answer": str(n + 1)} for n in many]
    known = {
        "openai/gsm8k": [
            {"question": f"What is {n} + 1?", "answer": f"One more than {n}.\n#### {n + 1}"} for n in many
        ],
        "trl-lib/ultrafeedback_binarized": [{**row, "score_chosen": 1.0} for row in conversations],
        "mlabonne/orpo-dpo-mix-40k": conversations,
        "HuggingFaceH4/no_robots": [{"messages": turns(f"say {n}", f"here it is: {n}")} for n in many],
        "trl-lib/kto-mix-14k": [
            {"prompt": turns(f"say {n}"), "completion": turns("", f"it is {n}")[1:], "label": n % 2 == 0} for n in many
        ],
        "trl-lib/math_shepherd": [
            {"prompt": f"add {n}", "completions": ["first", "then"], "labels": [True, n % 2 == 0]} for n in many
        ],
        "pairs.jsonl": [{"question": f"say {n}", "chosen": f"yes {n}", "rejected": f"no, not {n}"} for n in many],
        "hh_rlhf_harmless_test.jsonl.gz": [
            {key: f"\n\nHuman: say {n}\n\nAssistant: {key} {n}" for key in ("chosen", "rejected")} for n in many
        ],
        "nvidia/OpenCodeInstruct": [{"input": f"print {n} twice", "output": f"print({n}, {n}) # done"} for n in many],
        "sums.jsonl": sums,
        "asked.jsonl": sums,
        "held_out.jsonl": sums,
        "answered.jsonl": [{"messages": turns(f"What is {n} + 1?", f"#### {n + 1}")} for n in many],
        ".cache/own_method/prompts.jsonl": [{"prompt": f"{letter}:", "letter": letter} for letter in "abcdefgh"],
    }
    return known[path]


def made_small(content, folder, model, reward_model):
    """The keys of an example with what makes it small and lets it run anywhere."""
    for number, entry in enumerate([*content.get("datasets", ()), *content.get("test_datasets", ())]):
        file = folder / f"rows-{number}-{Path(entry['path']).name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows_in_the_form_of(entry["path"])))
        for key in ("name", "split"):
            entry.pop(key, None)
        entry["path"] = str(file)
    for key in ("fsdp", "fsdp_config", "load_in_4bit", "num_epochs", "bf16", "chat_template"):
        content.pop(key, None)
    if content.get("adapter") == "qlora":
        content["adapter"] = "lora"
    if content.get("optimizer", "").endswith("8bit"):
        content["optimizer"] = "adamw_torch"
    if "val_set_size" in content:
        content["val_set_size"] = 2
    if "distill" in content:
        content["distill"]["teacher"] = example_model(folder / "teacher", intermediate_size=16)
        content["trl"]["max_completion_length"] = 6
    elif content.get("trl"):
        small = {"num_generations": 4, "max_completion_length": 6, "use_vllm": False, "async_prefetch": False}
        content["trl"] |= {**small, "vllm_sync_interval": 1, "reward_num_workers": 1, "log_completions": False}
        named = content["trl"].get("reward_funcs", ())
        content["trl"] |= {"reward_funcs": [reward_model if "/" in one else one for one in named]} if named else {}
    if content.get("trl") and content.get("max_prompt_length"):
        content["max_prompt_length"] = 64
    content |= {"max_steps": 1, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "logging_steps": 1}
    if "sequence_len" in content or content.get("rl") not in ("grpo", "gdpo"):
        content["sequence_len"] = 200
    for stage in content.get("stages", ()):
        made_small(stage, folder, model, reward_model)
    return content


def example_model(folder, **changes):
    """The folder of a tiny chat model."""
    folder = write_model(folder, max_position_embeddings=1024, **changes)
    byte_tokenizer("chatml", TEMPLATE).save_pretrained(folder)
    return str(folder)


def trained(example, folder, model, reward_model):
    """Train an example in a folder of its own; the run folder."""
    for file in example.parent.glob("*.py"):
        shutil.copy(file, folder)
        sys.modules.pop(f"upweight_user.{file.stem}", None)
    content = made_small(yaml.safe_load(example.read_text()), folder, model, reward_model)
    top = {"base_model": model, "dataset_prepared_path": str(folder / "prepared")}
    content |= {**top, "output_dir": str(folder / "out")}
    if "stages" in content:
        content.pop("max_steps")
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    config = load_config(folder / "config.yaml")
    if config.stages:
        train_stages(config, lambda number, again: train(config.stages[number], resume=again))
    else:
        train(config)
    return str(folder / "out")
