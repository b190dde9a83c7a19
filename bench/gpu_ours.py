"""Our side of a GPU case: the training loop's own step on random weights; a line in, a JSON line out."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from bench.ours import METHODS, grpo_units
from upweight import GRPOConfig, GRPOTrainer
from upweight.config.load import parse_config
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.config.sections.training import OptimSection
from upweight.data.units import units_of
from upweight.methods import SFT
from upweight.models.adapters.attach import attach_adapter
from upweight.models.load import load_model
from upweight.train.policy import make_policy
from upweight.train.step import StepRunner


def random_base(work: dict[str, Any]) -> Any:
    """The case's model in bfloat16."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = AutoConfig.for_model(work.get("model_type", "qwen2"), vocab_size=work["vocabulary"], **work["shape"])
    with torch.device(work.get("device", "cuda")):
        base = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return base


def base_of(work: dict[str, Any]) -> Any:
    """The case's model; where it is quantised, the one that lies in the case's folder, with linear layers in 4 bits."""
    return quantised_base(Path(work["model"])) if work.get("quantised") else random_base(work)


def quantised_base(folder: Path, key: str = "load_in_4bit") -> Any:
    """The model of a folder, quantised as a key asks for."""
    kind = "qlora" if key == "load_in_4bit" else "lora"
    config = parse_config({"base_model": str(folder), "adapter": kind, key: True}, folder=folder, fragment=True)
    return load_model(config.model, torch.bfloat16, head="tokens", tokenizer=None, adapter=config.adapter, seed=0)


def savings_of(work: dict[str, Any]) -> OptimSection:
    """Checkpointing and the case's budget, or what a mode of `memory` sets."""
    optimizer = work.get("optimizer", "adamw_torch")
    if "memory" not in work:
        return OptimSection(token_budget=work["budget"], gradient_checkpointing=True, optimizer=optimizer)
    content = {"base_model": "x", "memory": work["memory"], "optimizer": optimizer, "adapter": "lora"}
    content |= {"token_budget": work["token_budget"]} if "token_budget" in work else {}
    return parse_config(content, folder=Path.cwd(), fragment=True).optim


def runner_of(work: dict[str, Any]) -> tuple[Any, StepRunner, list[Any]]:
    """Model, step runner and units of a case."""
    method = SFT() if work["name"] == "sft_step" else METHODS[work["name"]]
    if method.online:
        units = grpo_units(work["rows"], method)
    elif method.name == "sft":
        units = units_of(work["rows"], method)
    else:
        units = units_of([{f"{key}_ids": row[key] for key in row} for row in work["rows"]], method)
    base = base_of(work)
    section = None
    if work["lora_r"]:
        experts = work.get("lora_parameters")
        section = AdapterSection(
            kind="lora", rank=work["lora_r"], alpha=32, target_linear=True, target_parameters=experts
        )
    model = attach_adapter(base, section) if section else base
    model.train()
    optim, here = savings_of(work), torch.device(work.get("device", "cuda"))
    policy = make_policy(model, method, torch.bfloat16, here, longest=4096, optim=optim, section=ModelSection())
    parts = (policy.engine, Accelerator(), policy.token_budget, policy.reference, torch.bfloat16)
    return model, StepRunner(method, *parts, router_coefficient=policy.router_coefficient), units


def whole_step_of(
    work: dict[str, Any], folder: Path
) -> tuple[Any, StepRunner, Callable[[], Any], Callable[[Any], Tensor]]:
    """Model, step runner, what samples and scores a step's completions, and what trains on them."""
    prompts = [{"prompt": " ".join(f"t{token}" for token in row["prompt"])} for row in work["rows"]]
    vocabulary = {"</s>": work["vocabulary"], "<pad>": 1} | {f"t{n}": n for n in range(2, work["vocabulary"])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    checkpointed = {"token_budget": work["budget"], "gradient_checkpointing": True}
    config = GRPOConfig(
        output_dir=str(folder / "ours"),
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=len(prompts) * work["completions"] // work["micro_batch"],
        num_generations=work["completions"],
        max_completion_length=work["new_tokens"],
        bf16=True,
        **({"memory": work["memory"], "token_budget": work.get("token_budget")} if "memory" in work else checkpointed),
    )

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(ids) % 101 / 100 for ids in completion_ids]

    adapter = LoraConfig(r=work["lora_r"], lora_alpha=32, target_modules="all-linear")
    trainer = GRPOTrainer(
        base_of(work),
        reward,
        args=config,
        train_dataset=prompts,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>"),
        peft_config=adapter if work["lora_r"] else None,
    )
    model: Any = trainer.model
    model.train()  # as the trainer's loop does; loaded models come in the other mode
    rollouts, runner = trainer.rollouts, trainer.runner
    assert rollouts is not None

    def sample() -> Any:
        return rollouts.next_step(runner, model, trainer.state)

    def train(inputs: Any, /) -> Tensor:
        return runner.train(model, inputs["units"], inputs["counts"])

    return model, runner, sample, train


def wait_for_gpu() -> None:
    """Let what was started on a GPU end, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(folder: Path) -> None:
    """Answer "step" on stdin with the seconds, memory, loss and gradient norm of a step; "rest" frees memory.

    Of a step that samples too, `training_s` is what it takes from then on.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    work = json.loads((folder / "work.json").read_text())
    whole = work["name"] == "grpo_whole_step"
    if whole:
        model, runner, sample, train = whole_step_of(work, folder)
    else:
        model, runner, units = runner_of(work)

        def sample() -> Any:
            return units

        def train(inputs: Any, /) -> Tensor:
            return runner.train(model, inputs)

    for asked in sys.stdin:
        if asked == "rest\n":
            model.zero_grad()
            torch.cuda.empty_cache()
            continue
        model.zero_grad()
        wait_for_gpu()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        inputs = sample()
        wait_for_gpu()
        sampled = time.perf_counter()
        loss = train(inputs)
        wait_for_gpu()
        end = time.perf_counter()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        answer = {
            "s": end - start,
            **({"training_s": end - sampled} if whole else {}),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "loss": float(loss),
            "grad_norm": torch.nn.utils.get_total_norm(grads).item(),
            "tokens": runner.tokens,
        }
        runner.tokens = 0
        del grads  # or the next step would hold them beside its own
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
