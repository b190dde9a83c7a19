"""The table of a sweep, read from run folders, also while trials are missing or were cut off."""

import json

from upweight.runs.files import this_machine
from upweight.runs.sweep.plan import plan_trials
from upweight.runs.sweep.table import best_of, results_of, rows_of, write_table

_, TRIALS = plan_trials(["learning_rate=1,2,3", "note=<b>,x"])


def write_trial(folder, name, rows, **record):
    (folder / name).mkdir(parents=True)
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "run.json").write_text(json.dumps({"started": 10.0, **record}))


def test_results_and_the_best(tmp_path):
    first, second, third, *_ = TRIALS
    write_trial(
        tmp_path, first.name, [{"step": 1, "eval_loss": 3.0}, {"step": 2, "eval_loss": 2.0}], state="done", ended=15.0
    )
    write_trial(tmp_path, second.name, [{"step": 1, "eval_loss": 1.0}], state="failed", message="<script>no")
    write_trial(tmp_path, third.name, [{"step": 2, "eval_loss": 2.5}], state="done", ended=12.5)
    metric, results = results_of(tmp_path, TRIALS, None)
    assert metric == "eval_loss"
    assert [result.state for result in results] == ["done", "failed", "done", "waits", "waits", "waits"]
    assert [result.value for result in results[:3]] == [2.0, 1.0, 2.5]
    assert best_of(metric, results).name == first.name, "a failed trial is not the best"
    titles, cells = rows_of(metric, results)
    assert titles == ["learning_rate", "note", "eval_loss", "steps", "seconds", "state"]
    assert cells[0] == ["1", "<b>", "2 *", "2", "5", "done"]
    write_table(tmp_path, metric, results, {"config": "my.yaml"})
    assert json.loads((tmp_path / "sweep.json").read_text())["best"] == first.name
    page = (tmp_path / "sweep.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<script>" not in page
    assert (tmp_path / "report.html").is_file()


def test_rewards_are_means_of_the_last_logs_and_the_greatest_wins(tmp_path):
    _, (low, high) = plan_trials(["seed=1,2"])
    for trial, offset in ((low, 0.0), (high, 1.0)):
        rows = [{"step": n, "reward": offset + n} for n in range(1, 21)]
        write_trial(tmp_path, trial.name, rows, state="done", ended=20.0)
    metric, results = results_of(tmp_path, [low, high], None)
    assert metric == "reward"
    assert [result.value for result in results] == [15.5, 16.5]
    assert best_of(metric, results).name == high.name
    assert results_of(tmp_path, [low, high], "kl")[1][0].value is None


def test_a_trial_that_was_killed_is_not_shown_as_running(tmp_path):
    _, (first, second) = plan_trials(["seed=1,2"])
    rows = [{"step": 1, "loss": 1.0}]
    write_trial(tmp_path, first.name, rows, state="running", machine=this_machine(), pid=2**30, begun=1.0)
    write_trial(tmp_path, second.name, rows, state="running", machine="another", pid=2**30, begun=1.0)
    assert [result.state for result in results_of(tmp_path, [first, second], None)[1]] == ["killed", "running"]
