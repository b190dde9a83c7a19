"""Rollout backends of users: a class around `model.generate`, trained from YAML and from a script."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from made_rollouts import online_trainer
from made_runs import metrics_of, on_ranks, write_config, write_online, write_pairs
from parity_script import TEMPLATE, made_tokenizer, said
from parity_script import write_model as write_chat_model
from upweight import GRPOConfig, GRPOTrainer
from upweight.config import load_config
from upweight.errors import UserError
from upweight.runs.checkpoints import is_whole
from upweight.train.distributed.ranks import leave_ranks
from upweight.train.recording.callbacks import StopOnSignal
from upweight.train.run import train
from upweight.types import Completion, Sampling

USERS = '''
import os
import torch
from upweight.types import Completion

class Plain:
    """One prompt after the other by `generate`; log-probs are off by `shift`."""

    def __init__(self, model, tokenizer, shift=0.0):
        self.model, self.end, self.shift, self.now = model, tokenizer.eos_token_id, shift, -1

    def generate(self, prompts, count, sampling, done=None):
        torch.manual_seed(sampling.seed or 0)
        return [self.of_prompt(prompt, count, sampling) for prompt in prompts]

    def of_prompt(self, prompt, count, sampling):
        ids = torch.tensor([prompt], device=self.model.device)
        written = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature, top_k=0, num_return_sequences=count, pad_token_id=self.end,
            return_dict_in_generate=True, output_logits=True,
        )
        logps = (torch.stack(written.logits, 1).float() / sampling.temperature).log_softmax(-1)
        tokens = written.sequences[:, len(prompt):]
        logps = logps.gather(2, tokens[:, :, None])[:, :, 0] + self.shift
        completions = []
        for row, its_logps in zip(tokens.tolist(), logps.tolist()):
            length = row.index(self.end) + 1 if self.end in row else len(row)
            completions.append(
                Completion(row[:length], its_logps[:length], [self.now] * length, finished=self.end in row)
            )
        return completions

    def require_room(self, prompt, new):
        pass

    def sync(self, version):
        self.now = version

    def version(self):
        return self.now

    def close(self):
        pass

def look(key: str) -> str:
    """Look a thing up.

    Args:
        key: what to find.
    """
    return f"{key} is 7"

class Unfinished:
    def __init__(self, model, tokenizer):
        pass

    def generate(self, prompts, count, sampling, done=None):
        return []

class Short(Plain):
    def generate(self, prompts, count, sampling, done=None):
        return super().generate(prompts, count - 1, sampling)

class WithoutLogps(Plain):
    def generate(self, prompts, count, sampling, done=None):
        return [[Completion(one.ids, one.logps[1:], [], True) for one in group]
                for group in super().generate(prompts, count, sampling)]

class OfRank0(Plain):
    rank0_only = True

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        assert int(os.environ.get("RANK", "0")) == 0, "another rank built one"

class Breaks(Plain):
    def generate(self, prompts, count, sampling, done=None):
        raise ValueError("no room left")
'''


def config_for(folder, model, name="Plain", tools=False, **trl):
    module = f"samplers_{folder.name}".replace("-", "_")  # modules of users are kept by name
    (folder / f"{module}.py").write_text(USERS)
    keys = {"rollout_backend": f"{module}.{name}", **trl}
    file = write_online(folder, model, tools=[f"{module}.look"] if tools else None)
    return load_config(file, [f"trl.{key}={json.dumps(value)}" for key, value in keys.items()])


def steps_of(folder):
    return [row for row in metrics_of(folder / "out") if "loss" in row]


def test_a_users_backend_trains_from_yaml_and_its_log_probs_are_used(model_folder, tmp_path):
    train(config_for(tmp_path, model_folder))
    steps = steps_of(tmp_path)
    assert [row["rollout/lag"] for row in steps] == [0, 0]  # sync gave it the version of each step
    assert all(0 <= row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps)
    assert all(row["reward"] > 0 for row in steps)


def test_the_backend_of_the_docs_trains(model_folder, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "grpo.md").read_text(encoding="utf-8")
    example = page.partition("## Another sampler")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "samplers.py").write_text(example)
    config = config_for(tmp_path, model_folder, rollout_backend="samplers.Plain", rollout_backend_kwargs={"top_k": 50})
    train(config)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps_of(tmp_path))


def test_arguments_of_a_users_backend_reach_it(model_folder, tmp_path):
    config = config_for(tmp_path, model_folder, rollout_backend_kwargs={"shift": 0.25}, streaming_partial_batch=True)
    train(config)
    differences = [row["sampling/sampling_logp_difference/mean"] for row in steps_of(tmp_path)]
    assert differences == pytest.approx([0.25, 0.25], abs=1e-3)


def test_episodes_take_their_turns_from_a_users_backend(model_folder, tmp_path):
    train(config_for(tmp_path, model_folder, tools=True))
    steps = steps_of(tmp_path)
    assert all(row["environment/turns_mean"] >= 1 for row in steps)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps)


def train_alone_or_on_ranks(folder, model, world):
    config = config_for(folder, model, "OfRank0", async_prefetch=True)
    size = config.optim.model_copy(update={"micro_batch_size": 8 // world})
    train(dataclasses.replace(config, optim=size))


@pytest.mark.slow
def test_rank_0_samples_for_all_where_the_class_says_so(model_folder, tmp_path):
    """Each rank would otherwise build one and sample its share, with other draws than one rank alone."""
    runs = []
    for world in (1, 2):
        folder = tmp_path / f"ranks_{world}"
        folder.mkdir()
        on_ranks(train_alone_or_on_ranks, world, folder, model_folder, world)
        runs.append(metrics_of(folder / "out"))
    alone, together = runs
    assert len(alone) == len(together) == 2
    for row, other in zip(alone, together, strict=True):
        for name in ("reward", "completions/mean_length", "rollout/lag"):
            assert other[name] == row[name]
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "trl", "message"),
    [
        ("Unfinished", {}, r"'samplers_\w+.Unfinished' has no require_room, sync, version, close. It needs"),
        ("Short", {}, "generate gave 6 completions of 2 prompts, not 4 of each of 2"),
        ("WithoutLogps", {}, "generate gave a completion with"),
        ("Breaks", {}, r"generate failed: ValueError: no room left \(samplers_\w+.py, line"),
        ("Plain", {"rollout_backend_kwargs": {"shfit": 1}}, "cannot be built: TypeError: .*'shfit'"),
        ("Plane", {}, r"has no function 'Plane'. Did you mean 'Plain'\?"),
        ("Plain", {"rollout_backend": "plain"}, "there is no 'plain'. Name a function or a class as 'file.name'"),
    ],
)
def test_what_is_wrong_with_a_users_backend_is_said(name, trl, message, model_folder, tmp_path):
    with pytest.raises(UserError, match=f"^trl.rollout_backend: .*{message}"):
        train(config_for(tmp_path, model_folder, name, **trl))


class Greedy:
    """A backend in the script that uses it: the likeliest token, and those after it in the vocabulary."""

    def __init__(self, model, tokenizer):
        self.model, self.now = model, -1

    def generate(self, prompts, count, sampling: Sampling, done=None):
        assert not torch.is_grad_enabled()
        by_prompt = []
        for prompt in prompts:
            logps_V = self.model(input_ids=torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
            ids = [(int(logps_V.argmax()) + member) % len(logps_V) for member in range(count)]
            by_prompt.append([Completion([token], [float(logps_V[token])], [self.now], finished=True) for token in ids])
        return by_prompt

    def require_room(self, prompt, new):
        assert prompt > 0

    def sync(self, version):
        self.now = version

    def version(self):
        return self.now

    def close(self):
        self.now = -1


def test_a_users_backend_trains_from_a_script(tmp_path):
    write_chat_model(tmp_path / "model", made_tokenizer(TEMPLATE), trainer="GRPO")
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"), rollout_backend=f"{Greedy.__module__}.Greedy", max_steps=2, logging_steps=1,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=6, report_to="none",
        save_strategy="no", learning_rate=1e-3,
    )  # fmt: skip

    def tokens(completion_ids, **kwargs):
        return [float(ids[0] % 3) for ids in completion_ids]

    rows = [{"prompt": said("user", f"{n} + 1?")} for n in range(6)]
    model = str(tmp_path / "model")
    trainer = GRPOTrainer(model, tokens, arguments, rows, processing_class=made_tokenizer(TEMPLATE))
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    assert len(steps) == 2
    assert all(row["completions/mean_length"] == 1 for row in steps)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps)
    with pytest.raises(UserError, match="rollout_backend: cannot be used with 'use_vllm'"):
        GRPOTrainer(model, tokens, GRPOConfig(rollout_backend="a.B", use_vllm=True), rows)


@pytest.mark.parametrize("adapter", [False, True])
def test_tokens_drawn_with_weights_in_8_bits_are_corrected_for_in_training(tmp_path, adapter):
    gaps = []
    for name, section in {"plain": {}, "int8": {"sampler_quantization": "int8"}}.items():
        trainer = online_trainer(tmp_path / name, section=section, adapter=adapter, max_steps=2)
        trainer.train()
        lines = [row for row in trainer.state.log_history if "sampling/logp_gap" in row]
        assert len(lines) == 2
        assert all(("sampling/importance_sampling_ratio/mean" in row) == (name == "int8") for row in lines)
        assert all(row["sampling/importance_sampling_ratio/max"] > 1 for row in lines if name == "int8")
        gaps.append(min(row["sampling/logp_gap"] for row in lines))
    assert gaps[0] < 1e-4 < gaps[1]


def signalled_on_rank1(file):
    """Trains on a rank; rank 1 alone gets a signal after the second batch of an evaluation."""
    leave, calls = StopOnSignal.leave_evaluation, []

    def counted(stop, trainer):
        calls.append(trainer.state.global_step)
        if calls.count(1) == 2 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        leave(stop, trainer)

    setattr(StopOnSignal, "leave_evaluation", counted)  # noqa: B010
    with pytest.raises(SystemExit):
        train(load_config(file))
    assert [step for step in calls if step] == [1, 1]
    leave_ranks()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Plain", "OfRank0", None])
def test_ranks_leave_an_evaluation_together(name, model_folder, tmp_path):
    keys = {"micro_batch_size": 4, "max_steps": 3, "eval_steps": 1, "ddp_timeout": 60, "bf16": False}
    if name is None:
        rows = str(write_pairs(tmp_path / "rows.jsonl", 8))
        file = write_config(
            tmp_path, model_folder, test_datasets=[{"path": rows, "type": "chatml.intel"}], eval_batch_size=1, **keys
        )
    else:
        config_for(tmp_path, model_folder, name)
        content = yaml.safe_load((tmp_path / "config.yaml").read_text())
        content["trl"]["rollout_backend"] = f"samplers_{tmp_path.name.replace('-', '_')}.{name}"
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({**content, **keys, "test_datasets": content["datasets"]}))
    on_ranks(signalled_on_rank1, 2, file)
    assert is_whole(tmp_path / "out" / "checkpoint-1")
    assert not [row for row in metrics_of(tmp_path / "out") if row["step"] == 1 and "eval_runtime" in row]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state"] == "stopped"
