"""Verdicts on recorded runs: the sick ones are named, the healthy ones are left alone."""

import json
import logging
import random
import re
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from upweight.config.config import general_keys, method_keys
from upweight.train.health import AGAIN, FILE, HealthWatch, verdicts
from upweight.train.health_rules import RULES, table

HEALTHY = {
    "loss": 1e-8, "grad_norm": 0.4, "reward": 0.3, "reward_std": 0.4, "frac_reward_zero_std": 0.2, "entropy": 0.4,
    "sampling/entropy": 0.4, "kl": 0.05, "clip_ratio/region_mean": 0.02, "completions/clipped_ratio": 0.1,
    "completions/mean_length": 100.0, "completions/distinct_share": 1.0, "rewards/correct/mean": 0.1,
    "rewards/correct/std": 0.3, "rewards/my_format/mean": 0.4, "rewards/my_format/std": 0.5,
    "sampling/sampling_logp_difference/mean": 0.02, "sampling/importance_sampling_ratio/mean": 0.98,
    "ebft/alignment": 0.5, "ebft/diversity": 0.05, "ebft/cfm_loss": 5.0,
}  # fmt: skip
PAIRS = {
    "loss": 0.5, "grad_norm": 2.0, "rewards/margins": 0.3, "rewards/accuracies": 0.65, "rewards/chosen": 0.1,
    "rewards/rejected": -0.2,
}  # fmt: skip
ALL_ALIKE = {"reward": 0.35, "frac_reward_zero_std": 1.0, "reward_std": 0.0, "grad_norm": 0.0}

# name of a verdict, healthy values of that kind of run, what they are after step 20: numbers, or functions of the step
SICK = [
    ("solved", HEALTHY, {**ALL_ALIKE, "reward": 1.0, "sampling/entropy": 0.001, "completions/distinct_share": 0.1}),
    ("no signal", HEALTHY, ALL_ALIKE),
    ("little signal", HEALTHY, {"frac_reward_zero_std": lambda step: 0.95 if step % 3 else 0.75}),
    ("mode collapse", HEALTHY, {**ALL_ALIKE, "sampling/entropy": 0.001}),
    ("mode collapse", HEALTHY, {**ALL_ALIKE, "completions/distinct_share": 0.15}),
    ("reward at zero", {**HEALTHY, "reward": 0.0, "reward_std": 0.0}, {**ALL_ALIKE, "reward": 0.0}),
    ("constant reward", HEALTHY, {"rewards/correct/std": 0.0}),
    ("format ignored", {**HEALTHY, "rewards/my_format/mean": 0.01}, {}),
    ("reward fails", HEALTHY, {"rewards/correct/failed": 3.0}),
    ("flat reward", {**HEALTHY, "reward": lambda step: 0.3 + 0.05 * (-1) ** step}, {}),
    ("reward falls", HEALTHY, {"reward": 0.05}),
    ("far from the reference", HEALTHY, {"kl": lambda step: 0.8 + 0.2 * (-1) ** step}),
    ("kl explosion", HEALTHY, {"kl": 9.0}),
    ("entropy rises", HEALTHY, {"sampling/entropy": 3.0, "reward": 0.24}),
    ("large gradients", HEALTHY, {"grad_norm": 40.0}),
    ("large gradients", PAIRS, {"grad_norm": 400.0}),
    ("no gradient", PAIRS, {"grad_norm": 0.0}),
    ("no gradient", HEALTHY, {"grad_norm": 0.0}),
    ("sampler disagrees", HEALTHY, {"sampling/sampling_logp_difference/mean": 3.0}),
    ("samples hardly count", HEALTHY, {"sampling/importance_sampling_ratio/mean": 0.01}),
    ("much is clipped", HEALTHY, {"clip_ratio/region_mean": 0.5}),
    ("length hacking", HEALTHY, {
        "completions/mean_length": lambda step: 100.0 + 2 * step, "reward": 0.6,
        "completions/clipped_ratio": lambda step: min(step / 100, 0.9),
    }),
    ("truncated", HEALTHY, {"completions/clipped_ratio": 0.97}),
    ("features not aligned", HEALTHY, {"ebft/alignment": 0.02}),
    ("diversity term too large", HEALTHY, {"ebft/diversity": 2.0}),
    ("feature loss explodes", HEALTHY, {"ebft/cfm_loss": 400.0}),
    ("wrong way round", PAIRS, {"rewards/accuracies": 0.3, "rewards/margins": -0.5}),
    ("negative margins", PAIRS, {"rewards/accuracies": 0.5, "rewards/margins": -0.01}),
    ("nothing left to tell apart", PAIRS, {"rewards/accuracies": 1.0, "loss": 0.001}),
    ("loss rises", PAIRS, {"loss": 0.9}),
]  # fmt: skip


def run_of(healthy, sick=None, *, every=1, steps=300, since=20):
    """The rows of a run that is healthy, but for what falls sick."""
    rows = []
    for step in range(every, steps + 1, every):
        values = {**healthy, **(sick if sick and step > since else {})}
        rows.append({"step": step, **{name: v(step) if callable(v) else v for name, v in values.items()}})
    return rows


def learning(step):
    """A reward that rises with noise."""
    return 0.3 + 0.5 * step / 300 + 0.2 * random.Random(step).uniform(-1, 1)


@pytest.mark.parametrize(("name", "healthy", "sick"), SICK, ids=[f"{n} {i}" for i, (n, *_) in enumerate(SICK)])
@pytest.mark.parametrize("every", [1, 10])
def test_each_sickness_is_named_once_and_nothing_else_is(name, healthy, sick, every):
    if healthy.get("reward") == 0.3 and name not in ("flat reward", "entropy rises"):
        healthy = {**healthy, "reward": learning}
    found = verdicts(run_of(healthy, sick, every=every))
    assert [verdict.name for verdict in found] == [name]
    assert found[0].step > 20 or name in ("reward at zero", "format ignored", "flat reward")
    assert found[0].name in found[0].line()
    assert f"at step {found[0].step}" in found[0].line()


def test_every_rule_has_a_sick_run():
    assert {rule.name for rule in RULES} - {name for name, *_ in SICK} == {"overfitting"}


def test_healthy_runs_are_left_alone():
    noisy = random.Random(0)
    online = {**HEALTHY, "reward": learning, "grad_norm": lambda _: 0.4 if noisy.random() < 0.9 else 30.0,
              "frac_reward_zero_std": lambda _: noisy.choice([0.0, 0.5, 1.0])}  # fmt: skip
    pairs = {**PAIRS, "rewards/accuracies": lambda step: 0.5 + 0.3 * min(step / 100, 1) + noisy.uniform(-0.3, 0.2),
             "rewards/margins": lambda step: step / 100 + noisy.uniform(-0.5, 0.5)}  # fmt: skip
    assert verdicts(run_of(online)) == []
    assert verdicts(run_of(pairs)) == []
    assert verdicts(run_of({"loss": lambda step: 2.0 / (1 + step / 100), "grad_norm": 3.0})) == []


@pytest.mark.parametrize(("name", "healthy", "sick"), SICK, ids=[f"{n} {i}" for i, (n, *_) in enumerate(SICK)])
def test_a_run_of_two_steps_is_not_judged(name, healthy, sick):
    assert verdicts(run_of(healthy, sick, steps=2, since=0)) == []


def test_a_spike_says_nothing():
    spike = {"kl": lambda step: 2.4 if step == 60 else 0.01, "grad_norm": lambda step: 900.0 if step == 60 else 0.3}
    assert verdicts(run_of({**HEALTHY, "reward": learning}, spike)) == []


def test_what_went_away_is_said_again_only_after_long():
    def kl(step):
        return 5.0 if step < 60 or 80 < step < 100 or step > 100 + AGAIN + 20 else 0.01

    found = verdicts(run_of({**HEALTHY, "reward": learning}, {"kl": kl}, since=0))
    assert [(verdict.name, verdict.step) for verdict in found] == [("kl explosion", 5), ("kl explosion", AGAIN + 125)]


def test_overfitting_reads_the_evaluations():
    rows = []
    for step in range(1, 201):
        rows.append({"step": step, "loss": 1.0 - step / 250, "grad_norm": 1.0})
        if step % 50 == 0:
            rows.append({"step": step, "eval_loss": 0.8 + abs(step - 100) / 500})
    (verdict,) = verdicts(rows)
    assert (verdict.name, verdict.step, verdict.metric) == ("overfitting", 150, "eval_loss:worse")


def test_words_and_gaps_in_the_metrics_are_passed_over():
    rows = run_of({**HEALTHY, "reward": learning})
    for row in rows[::3]:
        row["kl"] = "nan"
        row.pop("entropy")
    assert verdicts(rows) == []


def state(step):
    return TrainerState(global_step=step, max_steps=300, is_world_process_zero=True)


def test_verdicts_are_said_and_kept_and_a_resumed_run_keeps_what_it_had(tmp_path, caplog):
    rows = run_of({**HEALTHY, "reward": learning}, {"kl": 9.0, "rewards/correct/failed": lambda step: 1.0}, steps=60)
    whole = verdicts(rows)
    assert len(whole) == 2
    caplog.set_level(logging.WARNING, "upweight")
    logging.getLogger("upweight").propagate = True
    (tmp_path / FILE).write_text("left by an earlier run\n")
    for since, until in ((0, 27), (25, 60)):  # stopped at 27, resumed from a checkpoint at 25
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:since]))
        watch = HealthWatch(tmp_path)
        watch.on_train_begin(None, state(since), TrainerControl())
        for row in rows[since:until]:
            logs = {name: value for name, value in row.items() if name != "step"}
            watch.on_log(None, state(row["step"]), TrainerControl(), logs=logs)
    kept = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(row["name"], row["step"]) for row in kept] == [(verdict.name, verdict.step) for verdict in whole]
    assert caplog.messages.count(whole[1].line()) == 1


def test_remedies_name_keys_that_exist():
    known = {*general_keys(), *method_keys()}
    words = " ".join(f"{rule.remedy} " for rule in RULES)
    named = {key.rstrip(".") for key in re.findall(r"\b(?:trl|ebft|vllm)\.[a-z_]+", words)}
    assert named
    assert not named - known
    for key in ("learning_rate", "max_grad_norm", "warmup_steps", "lora_target_modules", "unfrozen_parameters",
                "val_set_size", "load_best_model_at_end", "early_stopping_patience", "rl_beta"):  # fmt: skip
        assert key in known
        assert key in words


def test_the_table_in_the_docs_is_current():
    page = Path(__file__).parents[2] / "docs" / "stability.md"
    assert table() in page.read_text(), "python -m upweight.train.health_rules prints it"
