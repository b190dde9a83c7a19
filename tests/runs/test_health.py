"""Verdicts on recorded runs: the sick ones are named, the healthy ones are left alone."""

import json
import logging
import random
import re
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from made_health import HEALTHY, PAIRS, SICK, learning, run_of
from slow_cases import slow_except
from upweight import GRPOConfig
from upweight.config.config import general_keys, method_keys
from upweight.doctor.run import check_run
from upweight.runs import health
from upweight.runs.files import HEALTH, METRICS, RECORD
from upweight.runs.health import REPEAT_AFTER, RULES, Health, outdated, too_early, verdicts
from upweight.train.api.as_config import error_translator
from upweight.train.recording.callbacks import HealthCallback

EARLY = ("reward at zero", "empty answers", "format ignored", "flat reward", "rarely earned", "no signal so far")


@pytest.mark.parametrize(("name", "healthy", "sick"), SICK, ids=[f"{n} {i}" for i, (n, *_) in enumerate(SICK)])
@pytest.mark.parametrize("every", slow_except([10], [1, 10]))
def test_each_sickness_is_named_once_and_nothing_else_is(name, healthy, sick, every):
    if healthy.get("reward") == 0.3 and name not in (
        "flat reward",
        "entropy rises",
        "high entropy",
        "gradients above 1",
    ):
        healthy = {**healthy, "reward": learning}
    found = verdicts(run_of(healthy, sick, every=every))
    assert [verdict.name for verdict in found] == [name]
    assert found[0].step > 20 or name in EARLY
    assert found[0].name in found[0].line()
    assert f"at step {found[0].step}" in found[0].line()


def test_every_rule_has_a_sick_run():
    assert {rule.name for rule in RULES} - {name for name, *_ in SICK} == {"overfitting", "held-out loss explodes"}


def test_rules_without_enough_steps_are_too_early_and_not_silent():
    rows = run_of({**HEALTHY, "reward": 0.0, "frac_reward_zero_std": 1.0}, steps=12)
    waiting = {one.name: (one.level, one.step) for one in too_early(rows)}
    assert waiting["no signal"] == ("alarm", 20)
    assert "solved" not in waiting  # which judges from step 10 on
    assert too_early(run_of(HEALTHY, steps=300)) == []
    assert too_early([]) == []


@pytest.mark.parametrize("every", [1, 5, 12])
def test_rewards_without_spread_since_the_first_step_are_reported_in_short_runs(every):
    constant = {**HEALTHY, "reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    (verdict,) = verdicts(run_of(constant, steps=12, every=every))
    assert (verdict.name, verdict.level, verdict.step) == ("no signal so far", "warning", max(every, 4))
    assert f"for {verdict.step} steps" in verdict.line()
    assert "upweight rewards CONFIG" in verdict.remedy
    one_step_with_spread = {**constant, "frac_reward_zero_std": lambda step: 0.9 if step == 2 else 1.0}
    assert verdicts(run_of(one_step_with_spread, steps=12)) == []
    assert verdicts(run_of(constant, steps=3)) == []


def test_a_constant_reward_has_one_verdict_in_the_end_and_the_one_that_says_more():
    constant = {**HEALTHY, "reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    health = Health()
    as_it_runs = [verdict.name for row in run_of(constant, steps=25) for verdict in health.take(row)]
    assert as_it_runs == ["no signal so far", "no signal"]
    (verdict,) = verdicts(run_of(constant, steps=25))
    assert (verdict.name, verdict.level) == ("no signal", "alarm")
    assert "a reward that is always the same looks like this" in verdict.line()
    assert outdated(["no signal so far", "truncated"]) == set()


def test_healthy_runs_are_left_alone():
    noisy = random.Random(0)
    online = {**HEALTHY, "reward": learning, "grad_norm": lambda _: 0.4 if noisy.random() < 0.9 else 30.0,
              "frac_reward_zero_std": lambda _: noisy.choice([0.0, 0.5, 1.0])}  # fmt: skip
    pairs = {**PAIRS, "rewards/accuracies": lambda step: 0.5 + 0.3 * min(step / 100, 1) + noisy.uniform(-0.3, 0.2),
             "rewards/margins": lambda step: step / 100 + noisy.uniform(-0.5, 0.5)}  # fmt: skip
    assert verdicts(run_of(online)) == []
    assert verdicts(run_of(pairs)) == []
    assert verdicts(run_of({"loss": lambda step: 2.0 / (1 + step / 100), "grad_norm": 3.0})) == []


@pytest.mark.parametrize(
    ("mean", "std"),
    [(0.08, 0.04), (-0.1, 0.3), (0.1, 1.0), (3.0, 2.0)],
    ids=["small", "a penalty", "right is 1, wrong is -1", "large"],
)
def test_rewards_of_another_scale_do_not_count_as_rarely_earned(mean, std):
    rewards = {"rewards/correct/mean": mean, "rewards/correct/std": std, "rewards/other/mean": 0.9,
               "rewards/other/std": 0.3}  # fmt: skip
    assert verdicts(run_of({**HEALTHY, "reward": learning, **rewards})) == []


def test_small_spreads_and_gradients_above_1_are_healthy_where_the_reward_rises_or_always_was_small():
    small = {"group_reward_std": 0.03, "reward_std": 0.04, "reward": lambda step: 0.03 + 0.2 * step / 300}
    assert verdicts(run_of({**HEALTHY, **small})) == []
    steep = {"grad_norm": 3.0, "reward": lambda step: 0.3 + step / 30, "sampling/entropy": 1.3}
    assert verdicts(run_of({**HEALTHY, **steep})) == []


@pytest.mark.parametrize(("name", "healthy", "sick"), SICK, ids=[f"{n} {i}" for i, (n, *_) in enumerate(SICK)])
def test_a_run_of_two_steps_is_not_judged(name, healthy, sick):
    assert verdicts(run_of(healthy, sick, steps=2, since=0)) == []


def test_a_spike_says_nothing():
    spike = {"kl": lambda step: 2.4 if step == 60 else 0.01, "grad_norm": lambda step: 900.0 if step == 60 else 0.3}
    assert verdicts(run_of({**HEALTHY, "reward": learning}, spike)) == []


def test_what_went_away_is_said_again_only_after_long():
    def kl(step):
        return 5.0 if step < 60 or 80 < step < 100 or step > 100 + REPEAT_AFTER + 20 else 0.01

    found = verdicts(run_of({**HEALTHY, "reward": learning}, {"kl": kl}, since=0))
    assert [(verdict.name, verdict.step) for verdict in found] == [
        ("kl explosion", 5),
        ("kl explosion", REPEAT_AFTER + 125),
    ]


def test_overfitting_reads_the_evaluations():
    rows = []
    for step in range(1, 201):
        rows.append({"step": step, "loss": 1.0 - step / 250, "grad_norm": 1.0})
        if step % 50 == 0:
            rows.append({"step": step, "eval_loss": 0.8 + abs(step - 100) / 500})
    (verdict,) = verdicts(rows)
    assert (verdict.name, verdict.step, verdict.metric) == ("overfitting", 150, "eval_loss:worse")


def test_a_ruined_model_is_not_called_overfitted():
    ruined = {"loss": 900.0, "mean_token_accuracy": 0.0, "grad_norm": 1.0}
    train = [{"step": step, **ruined, **({"loss": 5.0} if step < 3 else {})} for step in range(1, 9)]
    soon, verdict = verdicts([{"step": 0, "eval_loss": 5.0}, *train, {"step": 8, "eval_loss": 1000.0}])
    assert (soon.name, soon.level, soon.step) == ("loss explodes", "alarm", 7)
    assert (verdict.name, verdict.level, verdict.step) == ("held-out loss explodes", "alarm", 8)
    assert "lower learning_rate" in verdict.remedy
    (small,) = verdicts([{"step": 0, "eval_loss": 0.001}, *train[:2], {"step": 2, "eval_loss": 0.004}])
    assert small.name == "overfitting"


def test_a_loss_that_swings_by_its_nature_does_not_explode():
    ipo = [{"step": step, "loss": 0.1 if step == 9 else 30.0, "mean_token_accuracy": 0.6} for step in range(1, 49)]
    assert not verdicts(ipo)


def test_words_and_gaps_in_the_metrics_are_passed_over():
    rows = run_of({**HEALTHY, "reward": learning})
    for row in rows[::3]:
        row["kl"] = "nan"
        row.pop("entropy")
    assert verdicts(rows) == []


def state(step):
    return TrainerState(global_step=step, max_steps=300, is_world_process_zero=True)


def test_a_reward_that_fails_on_much_has_one_verdict_with_the_share():
    failing = {"rewards/correct/failed": lambda step: 9.0, "rewards/correct/failed_share": lambda step: 0.3}
    (verdict,) = verdicts(run_of({**HEALTHY, "reward": learning}, failing, steps=60))
    assert (verdict.name, verdict.metric) == ("reward fails", "rewards/correct/failed_share")


def test_a_reward_that_fails_on_a_third_is_named_in_a_short_run():
    failing = {"rewards/correct/failed": 9.0, "rewards/correct/failed_share": 0.3}
    (verdict,) = [one for one in verdicts(run_of(HEALTHY, failing, steps=8, since=0)) if one.name == "reward fails"]
    assert verdict.step == 4


def test_verdicts_are_said_and_kept_and_a_resumed_run_keeps_what_it_had(tmp_path, caplog):
    rows = run_of({**HEALTHY, "reward": learning}, {"kl": 9.0, "rewards/correct/failed": lambda step: 1.0}, steps=60)
    whole = verdicts(rows)
    assert len(whole) == 2
    caplog.set_level(logging.WARNING, "upweight")
    logging.getLogger("upweight").propagate = True
    (tmp_path / HEALTH).write_text("left by an earlier run\n")
    for since, until in ((0, 27), (25, 60)):  # stopped at 27, resumed from a checkpoint at 25
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:since]))
        watch = HealthCallback(tmp_path)
        watch.on_train_begin(None, state(since), TrainerControl())
        for row in rows[since:until]:
            logs = {name: value for name, value in row.items() if name != "step"}
            watch.on_log(None, state(row["step"]), TrainerControl(), logs=logs)
    kept = [json.loads(line) for line in (tmp_path / HEALTH).read_text().splitlines()]
    assert [(row["name"], row["step"]) for row in kept] == [(verdict.name, verdict.step) for verdict in whole]
    assert caplog.messages.count(whole[1].line()) == 1


def test_in_a_script_remedies_name_its_arguments(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "upweight")
    logging.getLogger("upweight").propagate = True
    watch = HealthCallback(tmp_path, error_translator(GRPOConfig))
    logs = [{**HEALTHY, "reward": 0.5, "frac_reward_zero_std": 1.0}] * 4
    for step, row in enumerate(logs, 1):
        watch.on_log(None, state(step), TrainerControl(), logs=row)
    assert "`trainer.generate_completions(rows)`" in caplog.text
    assert "raise num_generations" in caplog.text
    kept = (tmp_path / HEALTH).read_text()
    assert "raise num_generations" in kept
    (tmp_path / METRICS).write_text("".join(json.dumps({**row, "step": n}) + "\n" for n, row in enumerate(logs, 1)))
    (tmp_path / RECORD).write_text(json.dumps({"state": "done", "settings": {"rl": "grpo"}}))
    remedies = {one.what: one.remedy for one in check_run(tmp_path)}
    assert "raise num_generations" in remedies["no signal so far"]
    (tmp_path / RECORD).write_text(json.dumps({"state": "done"}))
    assert "raise trl.num_generations" in {one.what: one.remedy for one in check_run(tmp_path)}["no signal so far"]


def test_in_a_script_a_checkpoint_is_named_as_its_trainer_takes_it():
    (verdict,) = verdicts(run_of({**HEALTHY, "reward": learning}, {"kl": 9.0}, every=10))
    remedy = error_translator(GRPOConfig)(verdict.remedy)
    assert "(`trainer.train(resume_from_checkpoint='RUN/checkpoint-N')`)" in remedy
    assert "raise beta" in remedy


def test_remedies_name_keys_that_exist():
    known = {*general_keys(), *method_keys()}
    words = " ".join(f"{rule.remedy} " for rule in RULES)
    named = {key.rstrip(".") for key in re.findall(r"\b(?:trl|ebft|vllm)\.[a-z_]+", words)}
    assert named
    assert not named - known
    assert words.count("a checkpoint before") == words.count("resume_from_checkpoint=RUN/checkpoint-N")
    assert "go back" not in words  # it cannot be typed
    for key in ("learning_rate", "max_grad_norm", "warmup_steps", "lora_target_modules", "unfrozen_parameters",
                "val_set_size", "load_best_model_at_end", "early_stopping_patience", "rl_beta",
                "resume_from_checkpoint"):  # fmt: skip
        assert key in known
        assert key in words


def test_a_metric_that_has_to_be_0_is_not_compared_with_0():
    (verdict,) = (one for one in verdicts(run_of(HEALTHY, {"grad_norm": 0.0}, steps=40)) if one.name == "no gradient")
    assert "(grad_norm 0, for " in verdict.line()


def test_a_task_that_is_hopeless_or_constant_is_not_solved():
    ends = {"reward_min": 0.0, "reward_max": 1.0}
    hopeless = {**HEALTHY, **ends, "reward": 0.05, "reward_std": 0.2, "frac_reward_zero_std": 0.85}
    constant = {**HEALTHY, "reward": 1.0, "reward_std": 0.0, "reward_min": 1.0, "reward_max": 1.0}
    for run, verdict in ((hopeless, "little signal"), ({**constant, "frac_reward_zero_std": 1.0}, "no signal")):
        names = {one.name for one in verdicts(run_of(run, {}, steps=60))}
        assert verdict in names
        assert "solved" not in names


def test_a_first_lucky_completion_is_no_solved_task():
    """Nothing is earned but by one completion in ten steps: groups score alike because none scores at all."""
    lucky = {"reward": lambda step: 0.004 if step % 8 == 7 else 0.0, "reward_std": lambda step: 0.03 * (step % 8 == 7),
             "frac_reward_zero_std": lambda step: 0.875 if step % 8 == 7 else 1.0}  # fmt: skip
    found = [verdict.name for verdict in verdicts(run_of({**HEALTHY, **lucky}, {}))]
    assert "solved" not in found
    assert "little signal" in found


def test_pairs_of_one_answer_twice_are_not_the_wrong_way_round():
    """Ties count as no accuracy, and their margins are 0."""
    ties = {"rewards/accuracies": 0.02, "rewards/margins": 0.0}
    assert "wrong way round" not in [verdict.name for verdict in verdicts(run_of(PAIRS, ties))]


def test_rules_of_one_verdict_have_its_remedy_written_once():
    text = " ".join(Path(health.__file__).with_name("health_rules.yaml").read_text().split())
    assert {rule.name: text.count(rule.remedy) for rule in RULES if text.count(rule.remedy) != 1} == {}
