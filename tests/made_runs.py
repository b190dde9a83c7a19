"""Rows of every data kind, a trainer around a tiny model, and run folders for tests of the loop."""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, TrainingArguments

from made_tokenizers import byte_tokenizer
from tiny_models import drawn, tiny
from upweight.cli.app import main
from upweight.config.sections.model import ModelSection
from upweight.config.sections.training import OptimSection
from upweight.methods import DPO, IPO, KTO, ORM, ORPO, PRM, SFT, SimPO
from upweight.models.load import disable_dropout
from upweight.processes import free_port
from upweight.train.assemble import TrainerParts
from upweight.train.policy import make_policy
from upweight.train.trainer import MethodTrainer

OFFLINE = {
    "sft": SFT(),
    "sft dft": SFT(loss_type="dft"),
    "dpo": DPO(),
    "dpo aot": DPO(loss_type="aot"),
    "dpo aot_unpaired and sft": DPO(loss_type=["aot_unpaired", "sft"], loss_weights=[1.0, 0.3]),
    "dpo damped": DPO(ld_alpha=0.4, use_weighting=True),
    "ipo": IPO(beta=1.0),
    "kto": KTO(undesirable_weight=0.7),
    "kto all": KTO(kl="all"),
    "kto apo": KTO(loss_type="apo_zero_unpaired"),
    "orpo": ORPO(alpha=0.5),
    "simpo": SimPO(beta=2.0),
    "orm": ORM(center_rewards_coefficient=0.1),
    "prm": PRM(),
}
VOWELS = """
def vowels(completions):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in texts]
"""
AUTO = {"sequence_score": AutoModelForSequenceClassification, "step_score": AutoModelForTokenClassification}
SCORES = {"sequence_score": 1, "step_score": 2}

HOLDER = """
import sys, time
from pathlib import Path
from upweight.runs.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""  # a process that holds a run folder


def rows_for(method, count: int = 11) -> list[dict]:
    """Rows of the method's kind of data, of many lengths; some prompts are shared."""
    made = []
    for n in range(count):
        prompt = drawn(100 + n // 2, 3 + n % 5).tolist()
        answers = [drawn(200 + 2 * n + side, 2 + (3 * n + 4 * side) % 9).tolist() for side in range(2)]
        if method.data == "pairs":
            made.append({"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1], "margin": 0.1 * n})
        elif method.data == "labelled":
            made.append({"prompt_ids": prompt, "completion_ids": answers[0], "label": n % 3 != 0})
        elif method.data == "steps":
            labels = [-100] * len(prompt) + [(n + k) % 2 if k % 2 else -100 for k in range(len(answers[0]))]
            made.append({"input_ids": prompt + answers[0], "labels": labels})
        else:
            made.append(
                {"input_ids": prompt + answers[0], "loss_mask": [False] * len(prompt) + [True] * len(answers[0])}
            )
    return made


def policy_for(method, adapter: bool = False):
    """A tiny model with the method's head, maybe under a LoRA adapter that is not zero."""
    auto = {"auto": AUTO[method.head], "num_labels": SCORES[method.head]} if method.head in AUTO else {}
    model = tiny("llama", num_hidden_layers=2, **auto)
    disable_dropout(model)
    if adapter:
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def trainer_for(
    method, folder, *, model=None, rows=None, batch=4, budget=4096, adapter=False, dtype=torch.float32, **options
):
    """A trainer of a tiny model with plain SGD; `options` are those of TrainingArguments and of MethodTrainer.

    Its `parts` are further options of `make_policy`.
    """
    model, parts = policy_for(method, adapter) if model is None else model, options.pop("parts", {})
    own = {name: options.pop(name) for name in ("eval_dataset", "callbacks", "lr_rule", "shuffle") if name in options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "use_cpu": True, "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch,
            "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
            "max_steps": 3, "logging_steps": 1, "logging_nan_inf_filter": False, "disable_tqdm": True,
            "report_to": "none", "save_strategy": "no", "remove_unused_columns": False, "seed": 5, **options,
        },
    )  # fmt: skip
    sharding = "fsdp" if arguments.fsdp else "deepspeed" if arguments.deepspeed else "none"
    policy = make_policy(
        model,
        method,
        dtype,
        torch.device("cpu"),
        longest=64,
        optim=OptimSection(token_budget=budget, **parts.pop("optim", {})),
        section=ModelSection(),
        sharding=sharding,
        **parts,
    )
    rows = Dataset.from_list(rows or rows_for(method))
    return MethodTrainer(TrainerParts(policy, arguments, train_dataset=rows, **own))


def weights_of(trainer) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def largest_difference(found, right) -> float:
    assert found.keys() == right.keys()
    return max(float((found[name] - right[name]).abs().max()) for name in right)


def write_model(folder: Path, kind: str = "llama", **changes) -> Path:
    """A tiny chat model with its tokenizer."""
    tokenizer = byte_tokenizer("chatml")
    tokenizer.save_pretrained(folder)
    tiny(kind, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
         bos_token_id=None, **{"num_hidden_layers": 2, **changes}).save_pretrained(folder)  # fmt: skip
    return folder


def write_pairs(file: Path, count: int) -> Path:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "others", "answer"]
    rows = [
        {
            "question": " ".join(words[(n + k) % len(words)] for k in range(3 + n % 4)),
            "chosen": f"the {words[n % len(words)]} dog",
            "rejected": f"{words[(3 * n) % len(words)]} " * (1 + n % 3),
        }
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_config(folder: Path, model: Path, **keys) -> Path:
    """A DPO config on local pairs that writes to `folder`/out; a key given as None is left out."""
    rows = write_pairs(folder / "pairs.jsonl", keys.pop("rows", 22))
    content = {
        "base_model": str(model), "rl": "dpo", "datasets": [{"path": str(rows), "type": "chatml.intel"}],
        "learning_rate": 9e-4, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "num_epochs": 2,
        "logging_steps": 1, "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"),
        **keys,
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return file


def write_online(folder: Path, model: Path, *, rewards: list[str] | None = None, **keys) -> Path:
    """A GRPO config on local chat prompts that writes to `folder`/out; a key given as None is left out."""
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in "abcdefgh"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = f"rewards_{folder.name}".replace("-", "_")  # modules of users are kept by name
    (folder / f"{module}.py").write_text(VOWELS)
    content = {
        "base_model": str(model), "rl": "grpo", "datasets": [{"path": str(folder / "prompts.jsonl")}],
        "chat_template": "chatml", "learning_rate": 9e-4, "micro_batch_size": 8, "max_steps": 2, "logging_steps": 1,
        "trl": {"num_generations": 4, "max_completion_length": 6, "reward_funcs": rewards or [f"{module}.vowels"]},
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return file


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics, without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["upweight.train.run", "made_runs"])


def started(function, *arguments, **environment) -> multiprocessing.Process:
    """A process that runs `function`, with torch and transformers already imported."""
    process = CONTEXT.Process(target=_in_child, args=(function, arguments, environment))
    process.start()
    return process


def on_ranks(function, world: int, *arguments) -> None:
    """Run `function` on so many ranks and wait for them; each has to end well."""
    port = free_port()
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [started(function, *arguments, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(world)]
    for rank in ranks:
        rank.join(240)  # long when the machine is busy; a dead rank ends the others at once
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * world


def upweight(*arguments, folder: Path | None = None, **environment) -> subprocess.CompletedProcess[str]:
    """The command as a person gives it, in `folder`, by a process that has imported most of what it needs."""
    with tempfile.TemporaryDirectory() as printed:
        given = [str(argument) for argument in arguments]
        process = started(_command, given, folder or Path(), Path(printed), **environment)
        process.join(200)
        out, error = ((Path(printed) / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert process.exitcode is not None, error
    return subprocess.CompletedProcess(arguments, process.exitcode, out, error)


def _command(arguments, folder, printed) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(printed / stream.name.strip("<>"), os.O_WRONLY | os.O_CREAT), stream.fileno())
        stream.reconfigure(encoding="utf-8")
    os.chdir(folder)
    sys.argv = ["upweight", *arguments]
    main()


def _in_child(function, arguments, environment) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    gc.freeze()  # what was imported: every training collects garbage
    function(*arguments)


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without what depends on the clock."""
    return {
        name: value for name, value in metrics.items() if not name.endswith(("_runtime", "_per_second", "step_time"))
    }
