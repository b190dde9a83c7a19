import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from made_runs import metrics_of, write_model, write_online
from upweight.config.load import load_config
from upweight.train.run import build, train

TRL = {"max_completion_length": 6, "teacher_kl_coef": 0.5, "temperature": 1.0}


@pytest.fixture
def models(tmp_path):
    write_model(tmp_path / "student", num_hidden_layers=1)
    write_model(tmp_path / "teacher", num_hidden_layers=2, hidden_size=16)
    return tmp_path


def config_of(models, **trl):
    file = write_online(models, models / "student")
    content = yaml.safe_load(file.read_text())
    rewards = content["trl"]["reward_funcs"]
    content["trl"] = {**TRL, **({"reward_funcs": rewards} if trl.pop("rewarded", False) else {}), **trl}
    content["distill"] = {"teacher": str(models / "teacher")}
    file.write_text(yaml.safe_dump(content))
    return load_config(file)


def plain_logps(folder, sample, temperature):
    model = AutoModelForCausalLM.from_pretrained(folder)
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
