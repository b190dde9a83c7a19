"""TRL's side of `data_prepare`, run by TRL's own Python: one JSON line with the seconds of its dataset preparation.

The clock runs over `DPOTrainer._prepare_dataset` alone: reading the file and building the trainer do not count.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

FOLDER, PROCESSES = Path(sys.argv[1]), int(sys.argv[2])
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the trainer prints is not an answer

from datasets import disable_progress_bars, load_dataset  # noqa: E402
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402


def cpu_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


class Timed(DPOTrainer):
    """A trainer that keeps what preparing its data took, and gave."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.rows = super()._prepare_dataset(*args, **kwargs)
        self.wall_s, self.cpu_s = time.perf_counter() - wall, cpu_seconds() - cpu
        return self.rows


disable_progress_bars()
rows = load_dataset("json", data_files=str(FOLDER / "rows.jsonl"), split="train", cache_dir=str(FOLDER / "peer"))
tokenizer = AutoTokenizer.from_pretrained(FOLDER / "tokenizer")
shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **shape))
model.save_pretrained(FOLDER / "model")  # from where the trainer loads its reference
options = DPOConfig(
    output_dir=str(FOLDER / "peer"),
    max_length=1024,
    dataset_num_proc=PROCESSES if PROCESSES > 1 else None,
    report_to=[],
    use_cpu=True,
)
trainer = Timed(model=str(FOLDER / "model"), args=options, train_dataset=rows, processing_class=tokenizer)
answer = {
    "wall_s": trainer.wall_s,
    "cpu_s": trainer.cpu_s,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "rows": len(trainer.rows),
    "first": [trainer.rows[number] for number in range(min(20, len(trainer.rows)))],
}
ANSWERS.write(json.dumps(answer) + "\n")
