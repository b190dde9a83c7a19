"""`fsdp=True` in a script: two ranks with shards train what one rank trains, offline and online."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from made_runs import on_ranks
from parity_script import TEMPLATE, made_tokenizer, said, write_model
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from upweight.errors import UserError

COMMON = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "max_steps": 2,
          "use_cpu": True, "bf16": False, "learning_rate": 1e-2, "optim": "sgd"}  # fmt: skip
PAIRS = [
    {"prompt": said("user", f"{n} + 1?"), "chosen": said("assistant", str(n + 1)), "rejected": said("assistant", "no")}
    for n in range(8)
]


def vowels():
    def vowels(completions, **kwargs):
        return [float(sum(letter in "aeiou" for letter in answer[0]["content"])) for answer in completions]

    return vowels


def trainers(folder: Path, ranks: int, **options):
    given = {"model": str(folder / "model"), "processing_class": made_tokenizer(TEMPLATE)}
    common = {**COMMON, "output_dir": str(folder / "out"), **options}
    yield DPOTrainer(args=DPOConfig(per_device_train_batch_size=4 // ranks, **common), train_dataset=PAIRS, **given)
    sizes = {"per_device_train_batch_size": 8 // ranks, "num_generations": 4, "max_completion_length": 6}
    args = GRPOConfig(**sizes, **common)
    prompts = [{"prompt": row["prompt"]} for row in PAIRS]
    yield GRPOTrainer(reward_funcs=vowels(), args=args, train_dataset=prompts, **given)


def logged(trainer) -> list[dict]:
    return [{k: line[k] for k in ("loss", "grad_norm")} for line in trainer.state.log_history if "loss" in line]


def run_rank(folder):
    found = []
    for trainer in trainers(folder, 2, fsdp=True):
        trainer.train()
        assert isinstance(trainer.model, FSDPModule)
        found.append(logged(trainer))
        if isinstance(trainer, GRPOTrainer):
            found.append([one["reward"] for one in trainer.generate_completions(PAIRS[:3], num_generations=2)])
    if trainer.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_a_script_shards_and_trains_the_same(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE), trainer="DPO")
    on_ranks(run_rank, 2, tmp_path)
    dpo, grpo, rewards = json.loads((tmp_path / "found.json").read_text())
    assert len(rewards) == 6
    for trainer, found in zip(trainers(tmp_path, 1), (dpo, grpo), strict=True):
        trainer.train()
        for line, right in zip(found, logged(trainer), strict=True):
            assert line == pytest.approx(right, rel=1e-5, abs=1e-5)


def run_zero_rank(folder):
    trainer = next(trainers(folder, 2, deepspeed={"zero_optimization": {"stage": 3}}))
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(logged(trainer)))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_a_script_under_zero_3_trains_the_same(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE, bos=False), trainer="DPO")
    on_ranks(run_zero_rank, 2, tmp_path)
    whole = next(trainers(tmp_path, 1))
    whole.train()
    for line, right in zip(json.loads((tmp_path / "found.json").read_text()), logged(whole), strict=True):
        assert line == pytest.approx(right, rel=1e-4, abs=1e-5)


def test_what_shards_otherwise_is_refused(tmp_path):
    with pytest.raises(UserError, match="leave out 'version'"):
        DPOConfig(output_dir=str(tmp_path), use_cpu=True, fsdp=True, fsdp_config={"version": 1})
