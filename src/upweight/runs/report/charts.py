"""Groups a run's metrics into charts with titles and explanations, as `charts.yaml` lists them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upweight.files import packaged_yaml


@dataclass(frozen=True)
class Spec:
    """The definition of a chart; a metric belongs to the first one with a pattern that matches its whole name."""

    group: str
    title: str
    metrics: Sequence[str]
    meaning: str
    labels: Sequence[str] = ()  # of the series, where there are several
    band: Sequence[str] = ()  # metric of the spread around the first series, or of its lower and upper edge
    unit: str = ""  # "share": values between 0 and 1
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


_TABLE: dict[str, list[dict[str, Any]]] = packaged_yaml(Path(__file__).with_suffix(".yaml"))
SPECS: tuple[Spec, ...] = tuple(Spec(group, **entry) for group, entries in _TABLE.items() for entry in entries)
GROUPS = tuple(_TABLE)
# What is worth comparing between evaluations, or between training and held-out rows.
COMPARED = (
    r"loss|reward|rewards/(accuracies|margins|.+/(mean|pass@\d+))|accuracy|margin|mean_token_accuracy|"
    r"completions/(mean_length|clipped_ratio)|ebft/.+"
)
UNCHARTED = r"step|epoch|total_flos|train_loss|train_runtime|rewards/.+/failed_share"  # the last: a count has a chart


def charts_of(trained: Iterable[str], evaluated: Iterable[str]) -> list[Chart]:
    """Return the charts of these metrics of training and of evaluations (`eval_...`), in page order."""
    logged = [name for name in dict.fromkeys(trained) if not re.fullmatch(UNCHARTED, name)]
    held_out = [split_set(name, logged) for name in dict.fromkeys(evaluated)]
    compared = [metric for _, metric in held_out if _has_chart(metric) and re.fullmatch(COMPARED, metric)]
    names = list(dict.fromkeys([*logged, *compared]))
    charts: list[Chart] = []
    taken: set[str] = set()
    for spec in SPECS:
        matching = [name for pattern in spec.metrics for name in names if re.fullmatch(pattern, name)]
        matching = [name for name in dict.fromkeys(matching) if name not in taken]
        for part in [[name] for name in matching] if spec.each else [matching] if matching else []:
            charts.append(_build_chart(spec, part, names))
            taken |= {*part, *(name for name in charts[-1].band if name != "reward_std")}
    charts += [Chart("Other", name, "", "", [("", name)]) for name in logged if name not in taken]
    for chart in charts:
        metrics = {metric for _, metric in chart.series}
        chart.held_out = [pair for pair in held_out if pair[1] in metrics and re.fullmatch(COMPARED, pair[1])]
    return charts


def split_set(name: str, metrics: Sequence[str] = ()) -> tuple[str, str]:
    """Split `eval_<metric>` or `eval_<set>_<metric>` into the name of the set and of the metric."""
    words = name.removeprefix("eval_").split("_")
    for count in range(len(words)):
        metric = "_".join(words[count:])
        if metric in metrics or _has_chart(metric):
            return "_".join(words[:count]), metric
    return "", "_".join(words)


def _has_chart(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for spec in SPECS for pattern in spec.metrics)


def _build_chart(spec: Spec, metrics: list[str], names: list[str]) -> Chart:
    labels = dict(zip(spec.metrics, spec.labels, strict=False))
    for name in metrics:
        match = re.fullmatch(spec.metrics[0], name)
        labels.setdefault(name, match[1] if match and match.groups() else "")
    of = labels[metrics[0]] if spec.each else ""
    series = [("" if spec.each else labels[name], name) for name in metrics]
    band, title = [pattern.format(of) for pattern in spec.band], spec.title.format(of) or of
    return Chart(spec.group, title, spec.meaning, spec.unit, series, band if set(band) <= set(names) else [])
