"""An adapter on a tiny chat model, as a run leaves it, without a training."""

import json
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from made_runs import write_model
from made_tokenizers import byte_tokenizer
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.data.tokenize.templates import chat_template

CARD = """---
base_model: some/base
library_name: peft
tags: [upweight, dpo, lora]
---

# run

An adapter for `some/base`, by DPO, 2 steps on 22 rows.

## Metrics

| metric | first | last |
|---|---|---|
| loss | 0.69 | 0.21 |
"""


def write_run(folder: Path, model: Path | None = None) -> Path:
    """A run folder with an adapter that is not zero, its tokenizer with a chat template, its card and its config."""
    model = model or write_model(folder.parent / "base")
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(str(folder))
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = chat_template(
        DataSection(chat_template="chatml"), DatasetSpec(), tokenizer, folder
    ).source
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.69}) + "\n")
    rows = [{"path": str(folder / "rows.jsonl"), "type": "chat_template"}]
    keys = {"base_model": str(model), "adapter": "lora", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    run = {**keys, "datasets": rows, "chat_template": "chatml", "output_dir": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(run))
    return folder
