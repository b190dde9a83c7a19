"""Runs in vLLM's own environment: the colocated engine against a tiny policy; prints what it found as JSON.

python colocated.py MODEL_FOLDER SCRATCH_FOLDER lora|full
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# What vLLM's environment lacks comes from the project's, after everything of its own.
sys.path.append(os.environ["UPWEIGHT_SITE"])

from peft import LoraConfig, get_peft_model

from upweight.rollout.vllm.colocated import VllmColocated
from upweight.types import Sampling


@torch.no_grad()
def largest_difference(model, prompts, found) -> float:
    worst = 0.0
    for prompt, completions in zip(prompts, found, strict=True):
        for one in completions:
            ids = torch.tensor([[*prompt, *one.ids]])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7
            own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            worst = max(worst, float((own - torch.tensor(one.logps)).abs().max()))
    return worst


def main(folder: str, scratch: str, kind: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    engine = VllmColocated(
        model, AutoTokenizer.from_pretrained(folder), dtype=torch.float32, folder=Path(scratch) / "vllm", longest=128,
        temperature=0.7,
    )  # fmt: skip
    prompts = [[65 + n, 66, 67 + n % 5, 68] for n in range(6)]
    rounds, heard = [], []
    for version in (0, 3, 4):
        engine.sync(version)
        heard.clear()
        found = engine.generate(prompts, 3, Sampling(12, temperature=0.7), lambda place, _: heard.append(place))
        rounds.append(
            {
                "version": engine.version(),
                "versions": sorted({number for group in found for one in group for number in one.versions}),
                "difference": largest_difference(model, prompts, found),
                "completions": [len(group) for group in found],
                "heard": list(heard),
                "folders": len(list((Path(scratch) / "vllm").iterdir())),
            }
        )
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.05 * torch.randn_like(weight))
    engine.close()
    print(json.dumps(rounds))


if __name__ == "__main__":  # the engine's process imports this file again
    main(*sys.argv[1:])
