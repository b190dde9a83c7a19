"""On-policy distillation on one GPU against TRL's `DistillationTrainer`, a JSON line: `python -m bench.gpu_distill`.

Random weights of Qwen2.5's shapes, a student of 1.5B and a teacher of 7B in bfloat16, gradient checkpointing, all
weights trained, reverse KL over the whole vocabulary. A step samples a completion of each prompt, which goes on to the
longest length, and trains on them; the optimizer is left out. Both sides run as processes of their own, in turn, and
before a step that counts each makes one that does not: who waits gives its cached memory back. They sample other
tokens, so that their losses are alike and not equal. `--tiny` does it with small models on a CPU.

TRL is run by this Python, or by the one named in TRL_PYTHON.
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_step import ROOT, SHAPE, VOCABULARY, Side, in_turn

TEACHER = SHAPE | {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def work_of(tiny: bool, prompts: int, new_tokens: int) -> dict[str, Any]:
    """Prompts and settings, for both sides."""
    rng = random.Random(0)
    vocabulary, length = (512, 24) if tiny else (VOCABULARY, 280)
    return {
        "device": "cpu" if tiny else "cuda",
        "prompts": [[rng.randrange(2, vocabulary) for _ in range(length)] for _ in range(prompts)],
        "micro_batch": 8,
        "budget": 16_384,
        "vocabulary": vocabulary,
        "student": SHAPE | SMALL if tiny else SHAPE,
        "teacher": TEACHER | SMALL | {"hidden_size": 128} if tiny else TEACHER,
        "new_tokens": new_tokens,
    }


def model_of(work: dict[str, Any], which: str, dtype: str = "bfloat16") -> Any:
    """Random weights, the same on both sides."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(which == "teacher")
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(work["device"]):
        config = Qwen2Config(vocab_size=work["vocabulary"], eos_token_id=None, pad_token_id=1, **work[which])
        made = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return made


def tokenizer_of(work: dict[str, Any]) -> Any:
    """The word `t7` is token 7; the end is a token that the models do not have."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    known = {"</s>": work["vocabulary"], "<pad>": 1} | {f"t{n}": n for n in range(2, work["vocabulary"])}
    words = Tokenizer(WordLevel(known, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", padding_side="left")


def prompts_of(work: dict[str, Any]) -> list[dict[str, str]]:
    return [{"prompt": " ".join(f"t{token}" for token in ids)} for ids in work["prompts"]]


def settings_of(work: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Arguments that both sides have."""
    on_gpu = work["device"] == "cuda"
    return {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": work["micro_batch"],
        "gradient_accumulation_steps": len(work["prompts"]) // work["micro_batch"],
        "max_completion_length": work["new_tokens"],
        "gradient_checkpointing": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
    }


class Device:
    """The clock and the memory of the device."""

    def __init__(self, name: str) -> None:
        import torch

        self.cuda = torch.cuda if name == "cuda" else None
        self.began = 0.0

    def start(self) -> None:
        if self.cuda is not None:
            self.cuda.synchronize()
            self.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()

    def seconds(self) -> float:
        if self.cuda is not None:
            self.cuda.synchronize()
        return time.perf_counter() - self.began

    def peak_gib(self) -> float:
        """The peak since the start of the step; on a CPU, that of the process."""
        if self.cuda is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return self.cuda.max_memory_allocated() / 2**30

    def allocated_gib(self) -> float:
        return 0.0 if self.cuda is None else self.cuda.memory_allocated() / 2**30

    def rest(self) -> None:
        if self.cuda is not None:
            self.cuda.empty_cache()


class OurSide:
    """Our trainer, a step at a time."""

    def __init__(self, folder: Path) -> None:
        from upweight import DistillationConfig, DistillationTrainer

        work = json.loads((folder / "work.json").read_text())
        dtype = "bfloat16" if work["device"] == "cuda" else "float32"
        self.trainer = DistillationTrainer(
            model_of(work, "student", dtype),
            model_of(work, "teacher", dtype),
            DistillationConfig(**settings_of(work, folder), token_budget=work["budget"]),
            train_dataset=prompts_of(work),
            processing_class=tokenizer_of(work),
        )
        self.model: Any = self.trainer.model
        self.device = Device(work["device"])
        self.inputs: dict[str, Any] = {}

    def sample(self) -> None:
        assert self.trainer.rollouts is not None
        self.inputs = self.trainer.rollouts.next_step(self.trainer.runner, self.model, self.trainer.state)

    def train(self) -> Any:
        return self.trainer.runner.train(self.model, self.inputs["units"], self.inputs["counts"])

    def step(self) -> dict[str, float]:
        """What a step takes and gives, from empty gradients."""
        import torch

        self.model.zero_grad()
        self.device.start()
        self.sample()
        sampled = self.device.seconds()
        loss = self.train()
        answer = {"s": self.device.seconds(), "sampling_s": sampled, "peak_gib": self.device.peak_gib()}
        grads = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        rollouts = self.trainer.rollouts
        assert rollouts is not None
        assert rollouts.current is not None
        return answer | {
            "loss": float(loss),
            "grad_norm": torch.nn.utils.get_total_norm(grads).item(),
            "tokens": sum(len(one.ids) for group in rollouts.current.groups for one in group.completions),
        }


def ours(folder: Path) -> None:
    """Answer "step" on stdin with what a step took; "rest" frees memory."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    side = OurSide(folder)
    for asked in sys.stdin:
        if asked == "rest\n":
            side.model.zero_grad()
            side.device.rest()
        else:
            print(json.dumps(side.step()), file=answers, flush=True)


def measure(work: dict[str, Any], steps: int, peers: list[str]) -> dict[str, Any]:
    """Medians of both sides' steps, after one of each to warm up, and how they compare."""
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("ours", *(f"trl_{dtype}" for dtype in peers)):
            folder = Path(temporary) / name
            folder.mkdir()
            (folder / "work.json").write_text(json.dumps(work))
            script = [ROOT / "bench" / "peers" / "trl_gpu_distill.py", folder, name.removeprefix("trl_")]
            theirs = [os.environ.get("TRL_PYTHON", sys.executable), *script]
            command = [sys.executable, "-m", "bench.gpu_distill", "--side", folder] if name == "ours" else theirs
            sides[name] = Side(command, folder / "log")
        try:
            line = in_turn(sides, steps)
        finally:
            for side in sides.values():
                side.end()
    for name in sides:
        if f"{name}_s" in line:
            line[f"{name}_tokens_per_s"] = line[f"{name}_tokens"] / line[f"{name}_s"]
            line[f"ratio_{name}"] = line[f"{name}_s"] / line.get("ours_s", float("nan"))
    line.pop("ratio_ours", None)
    return {"name": "gpu_distill_whole"} | {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_distill", description=__doc__)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side")
    parser.add_argument("--prompts", type=int, default=32, help="a multiple of 8")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--peer", choices=["float32", "bfloat16"], action="append", help="TRL's student (bfloat16)")
    parser.add_argument("--profile", action="store_true", help="our parts and kernels, without TRL")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side is not None:
        ours(asked.side)
        return
    work = work_of(asked.tiny, asked.prompts, asked.new_tokens)
    if asked.profile:
        from bench.gpu_distill_parts import report

        for line in report(work):
            print(json.dumps({"name": "gpu_distill_parts"} | line), flush=True)
        return
    print(json.dumps(measure(work, asked.steps, asked.peer or ["float32" if asked.tiny else "bfloat16"])), flush=True)


if __name__ == "__main__":
    main()
