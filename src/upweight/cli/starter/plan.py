"""What `upweight new` knows of the config to write, and its text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upweight.cli.starter.table import Table

KINDS = {"dpo": "pairs", "simpo": "pairs", "orpo": "pairs", "ipo": "pairs", "reward": "pairs", "kto": "labelled",
         "sft": "text", "grpo": "prompts"}  # fmt: skip
# Columns that are read where no mapping names others.
READ = {"prompt", "chosen", "rejected", "completion", "label", "messages", "conversations", "instruction", "input",
        "output", "text", "system", "tools", "margin", "image", "images", "input_ids", "labels"}  # fmt: skip
NUMBER = re.compile(r"[-+]?[$€£¥]? ?\d+([.,]\d+)* ?[$€£¥%]?")  # what the reward `numeric` reads whole
HEADS = {
    "reward": "reward_model: true",
    "sft": "",
    "kto": "rl: kto\nrl_beta: 0.1   # lower lets the model move further from where it began",
    "dpo": "rl: dpo\nrl_beta: 0.1   # lower lets the model move further from where it began",
    "grpo": "rl: grpo",
}
REWARDS = '''"""What a good answer is: change `good`. Try it without training: upweight rewards {config}"""


def good(completions, **columns):
    """Return one number for each completion; `columns` holds the columns of its rows, as lists."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(len(text.split()) <= 40) for text in texts]  # as an example: short answers
'''


@dataclass
class Plan:
    """What is known of the config to write."""

    table: Table
    method: str
    model: str
    entry: dict[str, Any] = field(default_factory=dict)  # of `datasets`, beside the path
    sequence_len: int = 1024
    memory: dict[str, str] = field(default_factory=dict)  # keys that make it fit
    gpu: float | None = None  # GiB of the GPU to train on; None: what is here
    notes: list[str] = field(default_factory=list)
    missing: str | None = None  # why the model cannot be read
    answer: str | None = None  # the column with right answers, for rewards

    @property
    def file(self) -> Path:
        return self.table.file

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return self.table.rows

    def has_numbers(self, column: str) -> bool:
        """Return whether a column holds numbers alone, as texts or not, with the sign of a currency or without."""
        values = [str(row[column]).strip() for row in self.rows if row.get(column) not in (None, "")]
        return bool(values) and all(NUMBER.fullmatch(value) for value in values)


def mapped_columns(entry: Mapping[str, Any]) -> list[str]:
    """Return the columns that the `type` of an entry names, if it is a mapping."""
    form = entry.get("type")
    if not isinstance(form, dict):
        return []
    named = [name for key, name in form.items() if key.startswith("field_")]
    return list(dict.fromkeys([*named, *filter(None, form.get("winner_values", {}).values())]))


def prompt_column(plan: Plan) -> str | None:
    form = plan.entry.get("type")
    if isinstance(form, dict):
        return form.get("field_prompt") or form.get("field_instruction")
    return "prompt" if form is None and "prompt" in plan.rows[0] else None


def content(plan: Plan) -> dict[str, Any]:
    """Return the config as values."""
    import yaml

    return yaml.safe_load(text_of(plan, Path("config.yaml")))


def text_of(plan: Plan, output: Path) -> str:
    """Return the config as commented YAML."""
    import yaml

    entry = {"path": str(_relative(plan.file, output)), **plan.entry}
    lines = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)
    lines = lines.replace("? '' :", "'':")  # the word of an empty cell, as people write it
    memory = dict(plan.memory)
    adapter = memory.pop("adapter", "lora")
    whole = "; remove these four lines to train all" if adapter == "lora" else ""
    held_out = min(32, max(len(plan.rows) // 10, 1)) if len(plan.rows) > 4 else 0
    answers = held_out and plan.method not in ("grpo", "reward")
    head = HEADS.get(plan.method, f"rl: {plan.method}")
    parts = [
        f"# {plan.method} on {plan.file.name}, written by `upweight new`. Every key: `upweight docs config`.",
        f"base_model: {plan.model}",
        *([head] if head else []),
        *(_rollout_lines(plan) if plan.method == "grpo" else []),
        "",
        "datasets:",
        *(f"  {line}" for line in lines.rstrip().splitlines()),
        f"val_set_size: {held_out}   # rows held out, on which the run evaluates",
        *([f"eval_samples: {min(held_out, 8)}   # how many are answered before and after"] if answers else []),
        *([] if plan.method == "grpo" else [f"sequence_len: {plan.sequence_len}   # longer rows are left out"]),
        "",
        f"adapter: {adapter}   # trains a few weights beside the model{whole}",
        "lora_r: 16",
        "lora_alpha: 32",
        "lora_target_linear: true",
        *(f"{key}: {value}" for key, value in memory.items()),
        "",
        "learning_rate: 1e-4   # the peak, for a short trial; without this line: the method's default",
        f"micro_batch_size: {8 if plan.method in ('grpo', 'kto') else 2}   # rows of a step, times the next line",
        f"gradient_accumulation_steps: {1 if plan.method == 'grpo' else 4}",
        "num_epochs: 1",
        "logging_steps: 1",
        f"output_dir: {'-'.join((output.stem if output.stem != 'config' else plan.file.stem).split())}-out",
    ]
    return "\n".join(parts) + "\n"


def answer_reward(plan: Plan) -> str:
    """Return the built-in reward that compares with the column of right answers."""
    return "numeric" if plan.answer and plan.has_numbers(plan.answer) else "exact"


def _rollout_lines(plan: Plan) -> list[str]:
    import yaml

    reward = "rewards.good   # in rewards.py, beside this file: change it"
    if plan.answer:
        spec = yaml.safe_dump(
            f"{answer_reward(plan)}(column={plan.answer!r})", allow_unicode=True, width=1000
        ).splitlines()[0]
        reward = f"{spec}   # `upweight docs rewards` lists others"
    return [
        "trl:",
        "  num_generations: 8   # completions of each prompt, compared with each other",
        "  max_completion_length: 256   # tokens; longer ones are cut",
        "  reward_funcs:",
        f"    - {reward}",
    ]


def _relative(file: Path, output: Path) -> Path:
    """Return the file as the config names it: from its own folder where it lies below."""
    folder = output.resolve().parent
    return file.resolve().relative_to(folder) if file.resolve().is_relative_to(folder) else file.resolve()
