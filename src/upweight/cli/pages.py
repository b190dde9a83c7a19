"""The pages of the documentation that are made from the code: `python -m upweight.cli.pages FOLDER` writes them."""

import dataclasses
import json
import sys
from pathlib import Path

from upweight.config.schema import markdown
from upweight.data.encode import SERVES
from upweight.data.formats.shown import SHOWN
from upweight.settings import Key
from upweight.train.api import configs
from upweight.train.api.configs import MethodArguments
from upweight.train.api.grpo_config import GRPOConfig

FORMATS_TOP = """\
# Data formats

Made by `make docs` from the rows that the tests read by each format.

```yaml
datasets:
  - path: rows.jsonl          # or .json, .csv, .parquet, .arrow, .gz; a folder; a dataset on the hub
    type: chat_template       # a format below, a function of yours, or nothing
```

- **No `type`**: rows say by their columns what they are; `passthrough` rows below show how.
- **Texts are taken as they are; messages go through the chat template** (`chat_template: tokenizer_default` unless
  another is named). `chatml.*` and `llama3.*` write that family's marks themselves.
- **Other columns**: `field_messages`, `field_chosen`, `field_rejected`, `field_system` and others rename columns;
  `type` as a mapping names columns and the texts they are put into ([config](config.md)).
- **Other forms**: `type: file.function` is a transform of yours, `def transform(cfg, **kwargs)` that returns a
  function from a row to a row (or to several, or None to drop it), which is then read as a row without `type`.
- A row that does not fit stops the run before training, with dataset, row and key. `upweight preprocess CONFIG --show
  3` shows what rows become, `--tokens` with token ids and loss masks.
"""
KTO_TOO = """
Every format of preference pairs serves too: each pair becomes a good and a bad answer.
"""
PEERS_TOP = """\
# Coming from TRL or Axolotl

Made by `make docs` from the tables in the code.

## From Axolotl

Configs are taken as they are: same keys, same blocks (`trl:`, `vllm:`, `ebft:`), same dataset types. What differs is
said when the file is read, key by key: `upweight validate my.yaml`. [Config keys](config.md) ends with three lists:
keys that hold already (packing, fused kernels: accepted, nothing to do), keys that were renamed, and keys that are
refused, with the reason and what to use instead.

| command | here |
|---|---|
| `axolotl train my.yaml` | `upweight train my.yaml` |
| `axolotl preprocess my.yaml` | `upweight preprocess my.yaml` |
| `axolotl evaluate my.yaml` | `upweight evaluate my.yaml` |
| `axolotl inference my.yaml` | `upweight inference my.yaml --chat` |
| `axolotl merge-lora my.yaml` | `upweight merge-lora my.yaml` |
| `axolotl vllm-serve my.yaml` | `upweight vllm-serve my.yaml` |
| `axolotl config-schema` | `upweight schema` |
| `axolotl agent-docs grpo` | `upweight agent-docs grpo` |

## From TRL

Scripts run with their import changed (`from upweight import GRPOConfig, GRPOTrainer`): arguments, dataset columns and
reward functions stay. [Differences](differences.md) says where numbers differ, and why. To go on with a YAML instead,
here is each argument's key; arguments of `TrainingArguments` have those of the first table.
"""
# Arguments of transformers' TrainingArguments -> keys, where the two differ in name.
SHARED = {
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_train_epochs": "num_epochs",
    "max_steps": "max_steps",
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_ratio": "warmup_ratio",
    "optim": "optimizer",
    "max_grad_norm": "max_grad_norm",
    "gradient_checkpointing": "gradient_checkpointing",
    "bf16": "bf16",
    "logging_steps": "logging_steps",
    "save_steps": "save_steps",
    "eval_steps": "eval_steps",
    "output_dir": "output_dir",
    "seed": "seed",
    "max_length": "sequence_len",
    "max_prompt_length": "max_prompt_length",
    "dataset_num_proc": "dataset_num_proc",
    "disable_dropout": "disable_dropout",
    "token_budget": "token_budget",
}


def formats_page() -> str:
    """`docs/formats.md`: a row of every format."""
    lines = [FORMATS_TOP]
    for kind, shown in SHOWN.items():
        lines += [f"## For {SERVES[kind]}"]
        lines += [KTO_TOO] if kind == "labelled" else [""]
        lines += ["| `type` | a row |", "|---|---|"]
        for one in shown:
            names = ", ".join(f"`{name}`" for name in one.names())
            lines.append(f"| {names} | `{json.dumps(one.row, ensure_ascii=False)}` |")
        lines.append("")
    return "\n".join(lines)


def peers_page() -> str:
    """`docs/peers.md`: commands and keys for those who come from elsewhere."""
    lines = [PEERS_TOP, *_table(SHARED)]
    classes = [one for one in vars(configs).values() if isinstance(one, type) and issubclass(one, MethodArguments)]
    for kind in [*(one for one in classes if one is not MethodArguments), GRPOConfig]:
        named = {}
        for argument in dataclasses.fields(kind):
            key: Key | None = argument.metadata.get("setting")
            if key is not None:
                named[argument.name] = key.path
        if named:
            lines += ["", f"### {kind.__name__}", "", *_table(named)]
        nothing = [f"`{one.name}`" for one in dataclasses.fields(kind) if "holds" in one.metadata]
        lines += ["", f"Accepted, nothing to do: {', '.join(sorted(nothing))}."]
    return "\n".join([*lines, ""])


def _table(named: dict[str, str]) -> list[str]:
    return ["| argument | key |", "|---|---|", *(f"| `{name}` | `{key}` |" for name, key in named.items())]


PAGES = {"config.md": markdown, "formats.md": formats_page, "peers.md": peers_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
