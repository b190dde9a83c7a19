import time

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from made_runs import largest_difference, metrics_of, started, write_model, write_online
from upweight.config.load import load_config
from upweight.runs.checkpoints import checkpoints_of
from upweight.train.run import build, evaluate, train

TRL = {"max_completion_length": 6, "teacher_kl_coef": 0.5, "temperature": 1.0}
AHEAD = {"async_prefetch": True, "prefetch_depth": 1}
ASKS_TWICE = """
class Asks:
    def reset(self, answer, **row):
        self.turns, self.answer = 0, answer
        return "think of " + answer

    def step(self, text):
        self.turns += 1
        if len(text) % 4 == 3:
            raise RuntimeError("broken")
        return "and again" if self.turns < 3 else None

    def get_reward(self):
        return float(self.turns)
"""


@pytest.fixture
def models(tmp_path):
    write_model(tmp_path / "student", num_hidden_layers=1)
    write_model(tmp_path / "teacher", num_hidden_layers=2, hidden_size=16)
    return tmp_path


def file_of(models, keys=None, **trl):
    """A config with a teacher beside rewards or without them."""
    file = write_online(models, models / "student", **(keys or {}))
    content = yaml.safe_load(file.read_text())
    rewards = content["trl"]["reward_funcs"]
    content["trl"] = {**TRL, **({"reward_funcs": rewards} if trl.pop("rewarded", False) else {}), **trl}
    content["distill"] = {"teacher": str(models / "teacher")}
    file.write_text(yaml.safe_dump(content))
    return file


def config_of(models, keys=None, **trl):
    return load_config(file_of(models, keys, **trl))


def acting(models):
    """Keys of an environment of several turns, some of whose episodes break."""
    module = f"asks_{models.name}".replace("-", "_")
    (models / f"{module}.py").write_text(ASKS_TWICE)
    stops = {"stop_token_ids": list(range(0, 400, 3))}
    return {"environment": {"type": "python", "class": f"{module}.Asks", "max_turns": 4}}, {
        "max_completion_length": 90, "generation_kwargs": stops, "num_generations": 4,
    }  # fmt: skip


def plain_logps(model, sample, temperature=1.0):
    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(model)
    ids, at = torch.from_numpy(sample.ids), torch.from_numpy(np.flatnonzero(sample.loss_mask))
    logits = model(input_ids=ids[None]).logits[0, at - 1] / temperature
    return logits.log_softmax(-1).gather(1, ids[at][:, None])[:, 0].detach().numpy()


@pytest.mark.parametrize(
    "trl",
    [
        {"num_generations": 1},
        {"num_generations": 1, "temperature": 0.7},
        {"num_generations": 4, "rewarded": True},
    ],
)
def test_the_advantage_of_a_token_is_the_teachers_log_prob_over_the_samplers(models, trl):
    temperature = trl.get("temperature", 1.0)
    trainer = build(config_of(models, **trl))
    trainer.model.eval()
    inputs = trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    advantages = [float(one) for group in trainer.rollouts.current.groups for one in group.advantage_S]
    assert any(advantages) == ("rewarded" in trl)
    for unit, advantage in zip(trainer.rollouts.units, advantages, strict=True):
        (sample,) = unit.samples
        teacher, student = (plain_logps(models / name, sample, temperature) for name in ("teacher", "student"))
        np.testing.assert_allclose(sample.token_advantages, advantage + 0.5 * (teacher - student), atol=2e-4)
    assert inputs["units"]
    trainer.rollouts.close()


@pytest.mark.slow
def test_the_policy_comes_closer_to_its_teacher_without_rewards(models):
    config = config_of(models, num_generations=1)
    config.optim.__dict__.update(max_steps=60, learning_rate=2e-2, micro_batch_size=32)
    train(config)
    values = [line["distill/sampled_kl"] for line in metrics_of(models / "out") if "distill/sampled_kl" in line]
    assert sum(values[-5:]) < 0.7 * sum(values[:5])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_rollout_of_earlier_weights_is_compared_with_those_weights(models, depth):
    ahead = {"async_prefetch": True, "prefetch_depth": depth} if depth else {}
    trainer = build(
        config_of(models, {"max_steps": 5, "learning_rate": 3e-2}, num_generations=2, rewarded=True, **ahead)
    )
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher")
    weights, lags, moved = {}, [], []

    def check(rollout, step):
        weights[step - 1] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        policy = AutoModelForCausalLM.from_pretrained(models / "student")
        for unit in trainer.rollouts.units:
            (sample,), group = unit.samples, rollout.groups[unit.group]
            policy.load_state_dict(weights[group.version])
            sampler = plain_logps(policy, sample)
            gap = sample.token_advantages - 0.5 * (plain_logps(teacher, sample) - sampler)
            np.testing.assert_allclose(gap, gap[:1].repeat(len(gap)), atol=2e-4)  # what is left is the reward's
            assert any(abs(gap[0] - float(one)) < 2e-4 for one in group.advantage_S)
            lags.append(step - 1 - group.version)
            moved.append(float(np.abs(plain_logps(trainer.model, sample) - sampler).max()))

    trainer.rollouts.on_rollout.append(check)
    trainer.train()
    trainer.rollouts.close()
    assert max(lags) == depth
    assert (max(moved) > 1e-2) == (depth > 0)  # today's policy would have given other advantages


@pytest.mark.parametrize("ahead", [{}, AHEAD])
def test_each_turn_of_an_episode_is_compared_with_the_teacher_and_nothing_else_is(models, ahead):
    keys, trl = acting(models)
    trainer = build(config_of(models, {**keys, "max_steps": 2}, rewarded=True, **trl, **ahead))
    turns, failed, gaps = [], [], []

    def check(rollout, step):
        advantages = [float(one) for group in rollout.groups for one in group.advantage_S]
        completions = [one for group in rollout.groups for one in group.completions]
        for unit, advantage, completion in zip(trainer.rollouts.units, advantages, completions, strict=True):
            failed.append(completion.failure is not None)
            assert any(sample.loss_mask.any() for sample in unit.samples) != failed[-1]
            for sample in unit.samples:
                if step == 1:  # later the policy has moved
                    teacher, student = (plain_logps(models / name, sample) for name in ("teacher", "student"))
                    gaps.append(teacher - student)
                    right = advantage + 0.5 * gaps[-1]
                    np.testing.assert_allclose(sample.token_advantages, right, atol=2e-4)
                turns.append(int((np.diff(sample.loss_mask.astype(int)) == 1).sum()))

    trainer.rollouts.on_rollout.append(check)
    trainer.train()
    trainer.rollouts.close()
    assert max(turns) == 3
    assert 0 < sum(failed) < len(failed)
    first = next(line for line in trainer.state.log_history if "distill/sampled_kl" in line)
    assert first["distill/sampled_kl"] == pytest.approx(-float(np.concatenate(gaps).mean()), abs=1e-4)


def run(file, resume=False):
    torch.set_num_threads(1)
    train(load_config(file), resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [False, True])
@pytest.mark.parametrize("ahead", [{}, AHEAD])
def test_killed_and_resumed_a_run_goes_on_exactly(models, tmp_path_factory, episodes, ahead):
    folders, trl = {}, {"num_generations": 4, "generation_batch_size": 16, "num_iterations": 2, "rewarded": True}
    for name in ("whole", "killed"):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        for model in ("student", "teacher"):
            (folder / model).symlink_to(models / model)
        keys, more = acting(folder) if episodes else ({}, {})
        # the checkpoint of step 3 lies within a rollout that is trained on for 4 steps
        keys |= {"max_steps": 8, "learning_rate": 1e-2, "save_steps": 3}
        file = file_of(folder, keys, **{**trl, **more, **ahead})
        if name == "whole":
            process = started(run, file)
            process.join(200)
            assert process.exitcode == 0
            continue
        process = started(run, file)
        while process.is_alive() and not checkpoints_of(folder / "out"):
            time.sleep(0.005)
        process.kill()
        process.join()
        assert not (folder / "out" / "model.safetensors").exists()
        again = started(run, file, True)
        again.join(200)
        assert again.exitcode == 0
    whole, other = (metrics_of(folder / "out") for folder in folders.values())
    clock = ("seconds", "idle")
    whole, other = (
        [{k: v for k, v in row.items() if not any(w in k for w in clock)} for row in rows] for rows in (whole, other)
    )
    # Which turns are sampled together depends on the clock, and rounds the sampler's log-probs, even without a kill.
    allowed = 1e-5 if episodes else 0
    for one, right in zip(other, whole, strict=True):
        assert one == (pytest.approx(right, rel=allowed, abs=allowed) if episodes else right)
    assert any("distill/sampled_kl" in row for row in whole)
    weights = [load_file(folder / "out" / "model.safetensors") for folder in folders.values()]
    assert largest_difference(*weights) <= allowed


def test_held_out_prompts_are_evaluated_without_rewards(models):
    found = evaluate(config_of(models, {"val_set_size": 2}, num_generations=1))
    assert found["eval_completions/mean_length"] > 0
