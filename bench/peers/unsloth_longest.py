"""The longest row that Unsloth trains in so many GiB: a JSON line for each limit. argv: folder of the case, limits.

The folder's work.json has the model's shape and the longest row to try. A row is one sequence, all of whose tokens are
trained on, with AdamW and Unsloth's checkpointing; lengths grow by half until one fails or a limit's minutes are over.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER, LIMITS = Path(sys.argv[1]), [float(limit) for limit in sys.argv[2:]]
WORK = json.loads((FOLDER / "work.json").read_text())
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is not an answer
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

from unsloth import FastLanguageModel  # noqa: E402  # isort: skip  # before the libraries that it changes

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from unsloth_gpu_words import LINEAR, word_tokenizer  # noqa: E402

GIB = 2**30


def policy() -> Any:
    """Random weights of the case's shape, with Unsloth's adapter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", vocab_size=WORK["vocabulary"], eos_token_id=0, **WORK["shape"])
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    made.save_pretrained(FOLDER / "model")
    word_tokenizer(WORK["vocabulary"]).save_pretrained(FOLDER / "model")
    del made
    gc.collect()
    torch.cuda.empty_cache()
    loaded, _ = FastLanguageModel.from_pretrained(
        str(FOLDER / "model"), max_seq_length=WORK["longest"], dtype=torch.bfloat16, load_in_4bit=WORK["quantised"]
    )
    rank = {"r": WORK["lora_r"], "lora_alpha": 32, "lora_dropout": 0, "target_modules": LINEAR}
    return FastLanguageModel.get_peft_model(loaded, **rank, use_gradient_checkpointing="unsloth").train()


def step(model: Any, optimizer: Any, length: int) -> tuple[float, float]:
    """Seconds and peak in GiB of a step on one row."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(2, 1000, (1, length), device="cuda")
    start = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / GIB


def search(model: Any, optimizer: Any, limit: float) -> dict[str, Any]:
    """The longest row that trained under a limit, and the shortest that failed."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(limit * GIB / total, 1.0))
    line: dict[str, Any] = {"gib": limit, "trained": 0, "failed": 0}
    began, length = time.perf_counter(), WORK["first"]
    while length <= WORK["longest"] and time.perf_counter() - began < 60 * WORK["minutes"]:
        try:
            seconds, peak = step(model, optimizer, length)
            line |= {"trained": length, "step_s": round(seconds, 2), "peak_gib": round(peak, 2)}
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            line["failed"] = length
            break
        length = length * 3 // 2 // 128 * 128
    return line


def main() -> None:
    model = policy()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-5)
    step(model, optimizer, 1024)  # compiles
    for limit in LIMITS:
        print(json.dumps(search(model, optimizer, limit)), file=ANSWERS, flush=True)


main()
