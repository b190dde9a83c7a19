"""Metrics -> charts."""

import pytest

from made_reports import metrics
from upweight.runs.report.charts import SPECS, charts_of, split_set


def by_title(charts):
    return {chart.title: chart for chart in charts}


def test_every_metric_has_exactly_one_chart():
    charts = charts_of(metrics(1), [])
    charted = [metric for chart in charts for _, metric in chart.series]
    bands = {name for chart in charts for name in chart.band}
    assert len(charted) == len(set(charted))
    assert set(charted) | bands == set(metrics(1)) - {"step", "epoch"}


def test_rewards_have_a_chart_each_with_their_spread_and_what_was_held_out():
    charts = by_title(charts_of(metrics(1), ["eval_rewards/correct/mean", "eval_reward_std"]))
    assert charts["correct"].series == [("", "rewards/correct/mean")]
    assert charts["correct"].band == ["rewards/correct/std"]
    assert charts["correct"].held_out == [("", "rewards/correct/mean")]
    assert charts["length"].held_out == []
    assert charts["Reward"].band == ["reward_std"]
    assert charts["Spread of the reward"].held_out == []
    assert charts["Length"].band == ["completions/min_length", "completions/max_length"]


def test_a_band_is_left_out_where_its_metric_is():
    assert by_title(charts_of(["rewards/one/mean"], []))["one"].band == []


def test_pairs_of_a_method_share_a_chart():
    charts = by_title(charts_of(["rewards/chosen", "rewards/rejected", "rewards/margins", "loss"], ["eval_loss"]))
    both = charts["Chosen and rejected"]
    assert both.series == [("chosen", "rewards/chosen"), ("rejected", "rewards/rejected")]
    assert charts["Loss"].held_out == [("", "loss")]
    assert "Each reward" not in {chart.group for chart in charts.values()}


@pytest.mark.parametrize(
    "logged",
    [
        "reward reward_std group_reward_std reward_min reward_max clip_ratio/low_min clip_ratio/high_max",
        "step_time rollout/seconds rollout/compile_seconds rollout/feature_seconds",
        "distill/agreement distill/divergence distill/forward_kl distill/reverse_kl distill/sampled_kl",
        "distill/cross_entropy distill/teacher_entropy distill/teacher_gain distill/ce_loss",
        "distill/aligned_share distill/unread_share distill/tail_mass distill/teacher_tail_mass",
        "mean_reward min_reward max_reward",
    ],
)
def test_what_methods_log_has_a_chart_that_explains_it(logged):
    charts = charts_of(logged.split(), [])
    assert all(chart.meaning for chart in charts)
    assert all(label for chart in charts if len(chart.series) > 1 for label, _ in chart.series)


def test_what_is_not_known_is_shown_too():
    (chart,) = charts_of(["tools/calls"], [])
    assert (chart.group, chart.title) == ("Other", "tools/calls")


def test_seconds_of_all_rewards_are_one_chart():
    (chart,) = charts_of(["rewards/a/seconds", "rewards/b/seconds"], [])
    assert chart.series == [("a", "rewards/a/seconds"), ("b", "rewards/b/seconds")]


def test_sets_of_evaluations_are_told_from_their_metrics():
    assert split_set("eval_loss") == ("", "loss")
    assert split_set("eval_hard_math_rewards/correct/mean") == ("hard_math", "rewards/correct/mean")
    assert split_set("eval_easy_mine", ["mine"]) == ("easy", "mine")
    assert split_set("eval_unknown") == ("", "unknown")


def test_every_kind_says_what_it_means():
    assert all(kind.meaning.endswith((".", ".)")) for kind in SPECS)
