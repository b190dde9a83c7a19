"""Runs in vLLM's own environment: the colocated engine after images; prints what it found as JSON.

python colocated_images.py MODEL_FOLDER SCRATCH_FOLDER lora|tower|full
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

# What vLLM's environment lacks comes from the project's, after everything of its own.
sys.path.append(os.environ["UPWEIGHT_SITE"])

from peft import LoraConfig, get_peft_model

from tiny_vision import drawn_image, processor
from upweight.models.processor import attach_processor, image_reader
from upweight.models.vision import freeze_vision
from upweight.rollout.vllm.colocated import VllmColocated
from upweight.types import Sampling

KIND = "idefics3"


def prompts_in(folder, reader):
    """Prompts with one, two and no images, and the images of each."""
    refs, ids = [], []
    for number, size in enumerate([(48, 32), (64, 64), (32, 80)]):
        file = folder / f"{number}.png"
        drawn_image(number, *size).save(file)
        ref, expansion = reader.refer(file.read_bytes(), str(file))
        refs.append(ref)
        ids.append(expansion.ids)
    prompts = [[65, 66, *ids[0], 67], [70, *ids[1], 71, 72, *ids[2], 73], [65, 66, 67]]
    return prompts, ((refs[0],), (refs[1], refs[2]), ())


@torch.no_grad()
def largest_difference(model, reader, prompts, images, found) -> float:
    worst = 0.0
    for prompt, refs, completions in zip(prompts, images, found, strict=True):
        for one in completions:
            ids = torch.tensor([[*prompt, *one.ids]])
            inputs = reader.plain_inputs([refs], ids) if refs else {}
            logits = model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1] / 0.7
            logits[:, reader.token_id] = -torch.inf
            own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            worst = max(worst, float((own - torch.tensor(one.logps)).abs().max()))
    return worst


def main(folder: str, scratch: str, trained: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer = attach_processor(processor(KIND), model.config)
    reader, vision = image_reader(tokenizer), freeze_vision(model)
    if trained == "lora":
        options = {"target_modules": "all-linear", "exclude_modules": vision, "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=4, **options))
    else:
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained == "full" or "vision_model" in name or "connector" in name)
    options = {"dtype": torch.float32, "folder": Path(scratch) / "vllm", "longest": 256, "temperature": 0.7}
    engine = VllmColocated(model, tokenizer, probes_images=True, **options)
    prompts, images = prompts_in(Path(scratch), reader)
    rounds, before = [], None
    for version in (0, 3, 4):
        engine.sync(version)
        found = engine.generate(prompts, 3, Sampling(12, temperature=0.7, images=images))
        compared = (model, reader, prompts, images)
        rounds.append(
            {
                "version": engine.version(),
                "difference": largest_difference(*compared, found),
                "former": None if before is None else largest_difference(*compared, before),
                "drawn": sum(one.ids.count(reader.token_id) for group in found for one in group),
                "completions": [len(group) for group in found],
            }
        )
        before = found
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.02 * torch.randn_like(weight))
    engine.close()
    print(json.dumps(rounds))


if __name__ == "__main__":  # the engine's process imports this file again
    main(*sys.argv[1:])
