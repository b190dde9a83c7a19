"""Groups a run's metrics into charts with titles and explanations."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from upweight.runs.health_rules import EXPLAINED

SHARE = "share"  # values between 0 and 1


@dataclass(frozen=True)
class Spec:
    """The definition of a chart; a metric belongs to the first one with a pattern that matches its whole name."""

    group: str
    title: str
    metrics: tuple[str, ...]
    meaning: str
    labels: tuple[str, ...] = ()  # of the series, where there are several
    band: tuple[str, ...] = ()  # metric of the spread around the first series, or of its lower and upper edge
    unit: str = ""
    each: bool = False  # every metric that matches has a separate chart, named by the pattern's group


@dataclass
class Chart:
    """A chart of a page; `held_out` are series from evaluations: name of the set, metric."""

    group: str
    title: str
    meaning: str
    unit: str
    series: list[tuple[str, str]]  # label, metric
    band: list[str] = field(default_factory=list)
    held_out: list[tuple[str, str]] = field(default_factory=list)


LOSS_OF_ONLINE_RUNS = next(why for what, why in EXPLAINED.items() if what.startswith("The loss of an online run"))

SPECS: tuple[Spec, ...] = (
    Spec("Reward", "Reward", ("reward",), "Mean over the completions of a step, weighted by trl.reward_weights. The "
         "band is one standard deviation to each side.", band=("reward_std",)),
    Spec("Reward", "Spread of the reward", ("group_reward_std", "reward_std"), "Standard deviation over the "
         "completions of a prompt, and over all. Where completions of a prompt score alike, nothing is learned.",
         labels=("within prompts", "over all")),
    Spec("Reward", "Groups without signal", ("frac_reward_zero_std",), "Share of prompts whose completions all score "
         "alike: their advantages are 0.", unit=SHARE),
    Spec("Each reward", "", (r"rewards/(.+)/mean",), "Mean of this reward before weighting. The band is one standard "
         "deviation to each side.", band=(r"rewards/{}/std",), each=True),
    Spec("Each reward", "{} without a value", (r"rewards/(.+)/failed",), "Completions for which this reward raised, "
         "timed out or returned what is no number.", each=True),
    Spec("Policy", "KL from the reference", ("kl",), "How far the policy has moved from where it began. Moderate "
         "growth is learning; above 0.5 it is far, above 2 it has left the reference behind."),
    Spec("Policy", "Entropy", ("entropy", "sampling/entropy"), "How uncertain the policy is of its next token: by the "
         "trainer over all words, by the sampler over what it wrote. Near 0 it always writes the same.",
         labels=("trainer", "sampler")),
    Spec("Policy", "Clip ratios", ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"), "Share of "
         "tokens whose update was clipped, in all, at the lower and at the upper bound. It stays 0 while each rollout "
         "feeds one step.", labels=("all", "low", "high"), unit=SHARE),
    Spec("Policy", "Clip ratio (cispo)", ("cispo_clip_ratio",), "Share of tokens whose weight was capped.", unit=SHARE),
    Spec("Completions", "Length", ("completions/mean_length",), "Tokens of a completion. The band goes from the "
         "shortest to the longest.", band=("completions/min_length", "completions/max_length"), unit="tokens"),
    Spec("Completions", "Length of those that ended", ("completions/mean_terminated_length",), "Tokens of completions "
         "that ended by themselves. The band goes from the shortest to the longest.",
         band=("completions/min_terminated_length", "completions/max_terminated_length"), unit="tokens"),
    Spec("Completions", "Cut at the length limit", ("completions/clipped_ratio",), "Share of completions that did not "
         "end by themselves.", unit=SHARE),
    Spec("Completions", "Distinct completions", ("completions/distinct_share",), "Share of a prompt's completions that "
         "differ from each other.", unit=SHARE),
    Spec("Environment", "Turns", ("environment/turns_mean", "environment/turns_max"), "Turns of an episode.",
         labels=("mean", "most")),
    Spec("Environment", "Episodes without an end", ("environment/masked", "environment/truncated"), "Episodes of a "
         "rollout whose environment broke (nothing is learned from them), and those that met a limit.",
         labels=("broken", "at a limit")),
    Spec("Environment", "Calls of tools", ("tools/call_frequency",), "For each episode."),
    Spec("Environment", "Failed calls", ("tools/failure_frequency",), "Share of the calls of tools.", unit=SHARE),
    Spec("Environment", "{}", (r"environment/(.+)",), "Of one server or environment, or seconds in all of them.",
         each=True),
    Spec("Preferences", "Accuracy", ("rewards/accuracies", "accuracy"), "Share of pairs (or marked steps) that the "
         "model ranks as the data does. 0.5 is a guess.", unit=SHARE),
    Spec("Preferences", "Margin", ("rewards/margins", "margin"), "By how much chosen answers are preferred to rejected "
         "ones; it should rise above 0."),
    Spec("Preferences", "Chosen and rejected", ("rewards/chosen", "rewards/rejected"), "Implied rewards of both sides. "
         "Both may fall while the distance grows.", labels=("chosen", "rejected")),
    Spec("Preferences", "Log-probs", ("logps/chosen", "logps/rejected"), "Summed over the tokens of an answer.",
         labels=("chosen", "rejected")),
    Spec("Preferences", "Logits", ("logits/chosen", "logits/rejected"), "Mean logit over the vocabulary.",
         labels=("chosen", "rejected")),
    Spec("Preferences", "Score", ("mean_reward", "min_reward", "max_reward"), "Scores of the reward model."),
    Spec("Preferences", "Log-odds", ("log_odds_chosen", "log_odds_ratio"), "Odds of the chosen answer against the "
         "rejected one, as ORPO's loss sees them.", labels=("chosen", "ratio")),
    Spec("Loss", "Loss", ("loss",), "What is minimised. Lower is better for offline methods. Of online runs: "
         + LOSS_OF_ONLINE_RUNS.replace("`", "")),
    Spec("Loss", "Loss of the chosen text", ("nll_loss",), "Cross-entropy on the chosen answers."),
    Spec("Loss", "Token accuracy", ("mean_token_accuracy",), "Share of tokens that the model finds likeliest.",
         unit=SHARE),
    Spec("Loss", "Gradient norm", ("grad_norm",), "Before clipping. Jumps by a factor of ten and more are a warning."),
    Spec("Loss", "Learning rate", ("learning_rate",), "As the schedule sets it."),
    Spec("Sampler", "Lag", ("rollout/lag",), "Optimizer steps between the policy that wrote a rollout and the one that "
         "trains on it.", unit="steps"),
    Spec("Sampler", "Sampler against trainer", ("sampling/sampling_logp_difference/mean",), "Mean distance between "
         "what sampler and trainer say of the same tokens. Above 1 the sampler's weights are old or another model's."),
    Spec("Sampler", "Importance ratio", ("sampling/importance_sampling_ratio/mean",), "Weight that the correction for "
         "the sampler leaves to tokens; near 1 is good."),
    Spec("Sampler", "Kept samples", ("sampling/off_policy_kept",), "Share of samples that are not too far from the "
         "policy.", unit=SHARE),
    Spec("Sampler", "Forwarded completions", ("forwarded_share",), "Share of completions that can contribute to the "
         "loss and were forwarded.", unit=SHARE),
    Spec("Speed", "Tokens per second", ("tokens_per_second", "training/tokens_per_second",
         "rollout/tokens_per_second"), "Of the run in all, while it trains, and while completions are written.",
         labels=("all", "training", "sampling")),
    Spec("Speed", "Seconds of a rollout", ("rollout/seconds", "rollout/generation_seconds", "rollout/wait_seconds",
         "rollout/sync_seconds", "rollout/queued_seconds"), "Time for a rollout, its part for writing, how long "
         "training waited for it, how long the sampler took to follow the policy, and how long a rollout lay ready.",
         labels=("in all", "writing", "waited for", "sync", "lay ready"), unit="seconds"),
    Spec("Speed", "Seconds in rewards", (r"rewards/(.+)/seconds",), "Time for the rewards of one rollout.",
         unit="seconds"),
    Spec("Speed", "Waiting", ("rollout/trainer_idle", "rollout/sampler_idle", "rollout/share_of_seconds"), "Share of "
         "the time in which training waited for rollouts, the sampler for work, and all waited for a rollout.",
         labels=("trainer", "sampler", "rollouts"), unit=SHARE),
    Spec("Speed", "Tokens so far", ("num_tokens",), "Prompts and completions.", unit="tokens"),
    Spec("Features", "{}", (r"ebft/(.+)",), "Terms of feature matching (EBFT): alignment of 0.3 to 0.9 and diversity "
         "of 0.01 to 0.1 are usual.", each=True),
)  # fmt: skip
GROUPS = tuple(dict.fromkeys(spec.group for spec in SPECS))
# What is worth comparing between evaluations, or between training and held-out rows.
COMPARED = (
    r"loss|reward|rewards/(accuracies|margins|.+/(mean|pass@\d+))|accuracy|margin|mean_token_accuracy|"
    r"completions/(mean_length|clipped_ratio)|ebft/.+"
)
UNCHARTED = {"step", "epoch", "total_flos", "train_loss", "train_runtime"}


def charts_of(trained: Iterable[str], evaluated: Iterable[str]) -> list[Chart]:
    """Return the charts of these metrics of training and of evaluations (`eval_...`), in page order."""
    logged = [name for name in dict.fromkeys(trained) if name not in UNCHARTED]
    held_out = [split_set(name, logged) for name in dict.fromkeys(evaluated)]
    compared = [metric for _, metric in held_out if _charted(metric) and re.fullmatch(COMPARED, metric)]
    names = list(dict.fromkeys([*logged, *compared]))
    charts: list[Chart] = []
    taken: set[str] = set()
    for spec in SPECS:
        matching = [name for pattern in spec.metrics for name in names if re.fullmatch(pattern, name)]
        matching = [name for name in dict.fromkeys(matching) if name not in taken]
        for part in [[name] for name in matching] if spec.each else [matching] if matching else []:
            charts.append(_chart(spec, part, names))
            taken |= {*part, *(name for name in charts[-1].band if name != "reward_std")}
    charts += [Chart("Other", name, "", "", [("", name)]) for name in logged if name not in taken]
    for chart in charts:
        metrics = {metric for _, metric in chart.series}
        chart.held_out = [pair for pair in held_out if pair[1] in metrics and re.fullmatch(COMPARED, pair[1])]
    return charts


def split_set(name: str, known: Sequence[str] = ()) -> tuple[str, str]:
    """Split `eval_<metric>` or `eval_<set>_<metric>` into the name of the set and of the metric."""
    words = name.removeprefix("eval_").split("_")
    for count in range(len(words)):
        metric = "_".join(words[count:])
        if metric in known or _charted(metric):
            return "_".join(words[:count]), metric
    return "", "_".join(words)


def _charted(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for spec in SPECS for pattern in spec.metrics)


def _chart(spec: Spec, metrics: list[str], names: list[str]) -> Chart:
    labels = dict(zip(spec.metrics, spec.labels, strict=False))
    for name in metrics:
        match = re.fullmatch(spec.metrics[0], name)
        labels.setdefault(name, match[1] if match and match.groups() else "")
    of = labels[metrics[0]] if spec.each else ""
    series = [("" if spec.each else labels[name], name) for name in metrics]
    band, title = [pattern.format(of) for pattern in spec.band], spec.title.format(of) or of
    return Chart(spec.group, title, spec.meaning, spec.unit, series, band if set(band) <= set(names) else [])
