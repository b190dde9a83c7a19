"use strict";
// Curves: one uPlot for each chart, all with one cursor and one zoom.

const curves = { smooth: 0, zoom: null, drawn: [], plots: new Map() };
const HEIGHT = 188;

function chartsFor(data, runs) {
  const has = (run, metric) => run.metrics[metric] !== undefined;
  const held = (run, chart) => chart.held_out.filter((pair) => run.evaluated[heldName(pair)]);
  return data.charts.filter((chart) =>
    runs.some((run) => chart.series.some(([, metric]) => has(run, metric)) || held(run, chart).length));
}

const heldName = ([set, metric]) => (set ? `eval_${set}_${metric}` : `eval_${metric}`);

function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// Lines of a chart: {label, colour, dash, steps, values, kind: line | raw | low | high | points}.
function linesOf(chart, runs) {
  const lines = [];
  const several = runs.length > 1;
  let place = 0;
  for (const [number, run] of runs.entries()) {
    const own = chart.series.filter(([, metric]) => run.metrics[metric]);
    for (const [order, [label, metric]] of own.entries()) {
      const colour = runColour(several ? number : place++);
      const name = several ? [run.name, label].filter(Boolean).join(", ") : label || (chart.held_out.length ? "training" : chart.title);
      const base = { label: name, colour, metric, steps: run.steps, dash: several && order ? [6, 3 + order] : [] };
      const values = run.metrics[metric];
      if (order === 0 && chart.band.length) lines.push(...bandOf(chart, run, base, values));
      if (curves.smooth) {
        lines.push({ ...base, kind: "raw", values });
        lines.push({ ...base, kind: "line", values: smoothed(values, curves.smooth) });
      } else lines.push({ ...base, kind: "line", values });
    }
    for (const pair of chart.held_out) {
      const values = run.evaluated[heldName(pair)];
      if (!values) continue;
      const colour = several ? runColour(number) : cssColour("--held-out");
      const label = [several && run.name, "held out", pair[0]].filter(Boolean).join(", ");
      lines.push({ label, colour, metric: pair[1], steps: run.eval_steps, values, dash: [2, 4], kind: "points" });
    }
  }
  return lines;
}

function bandOf(chart, run, base, values) {
  const [first, second] = chart.band.map((name) => run.metrics[name]);
  if (!first || (chart.band.length > 1 && !second)) return [];
  const middle = curves.smooth && !second ? smoothed(values, curves.smooth) : values;
  const spread = curves.smooth && !second ? smoothed(first, curves.smooth) : first;
  const both = (value, other, sign) => (value === null || other === null ? null : value + sign * other);
  const bound = reachable(run, base.metric, values);
  const low = second ? first : middle.map((value, at) => bound(both(value, spread[at], -1)));
  const high = second || middle.map((value, at) => bound(both(value, spread[at], 1)));
  return [{ ...base, kind: "high", values: high }, { ...base, kind: "low", values: low }];
}

// One standard deviation may lie beyond every value that a reward has: the band ends at those that were seen.
function reachable(run, metric, values) {
  const seen = (run.ranges || {})[metric];
  if (!seen) return (value) => value;
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(seen[0], ...known), Math.max(seen[1], ...known)];
  return (value) => (value === null ? null : Math.min(Math.max(value, low), high));
}

function tableOf(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((one, other) => one - other);
  const at = new Map(steps.map((step, place) => [step, place]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(null);
    line.steps.forEach((step, place) => { column[at.get(step)] = line.values[place]; });
    return column;
  });
  return [steps, ...columns];
}

function fade(colour, alpha) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}

function seriesOf(line, count) {
  const shared = { label: line.label, spanGaps: true, dash: line.dash };
  if (line.kind === "low" || line.kind === "high") {
    return { ...shared, dash: [], stroke: fade(line.colour, 0), width: 0, points: { show: false } };
  }
  const few = line.values.filter((value) => value !== null).length < 3;
  const points = { show: line.kind === "points" || (few && line.kind === "line"), size: 6, fill: line.colour };
  if (line.kind === "raw") return { ...shared, stroke: fade(line.colour, 0.28), width: 1, points: { show: false } };
  return { ...shared, stroke: line.colour, width: count > 600 ? 1.25 : 2, points };
}

function rangeOf(chart) {
  return (plot, low, high) => {
    if (low === null || high === null) return [0, 1];
    // At least so much that the labels of a curve that hardly moves differ in digits for which there is room.
    const room = low === high ? Math.abs(high) * 0.1 || 0.5 : Math.max((high - low) * 0.08, Math.abs(high) * 1e-5);
    const share01 = chart.unit === "share";
    const floor = share01 ? Math.max(low - room, 0) : low >= 0 ? Math.max(low - room, 0) : low - room;
    const ceiling = share01 && high <= 1 ? Math.min(high + room, 1.02) : high + room;
    return [floor, ceiling > floor ? ceiling : floor + 1];
  };
}

function optionsOf(chart, lines, width, verdicts, told) {
  const ink = cssColour("--muted");
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const grid = { stroke: cssColour("--line"), width: 1 };
  const axis = { stroke: ink, font, grid, ticks: { ...grid, size: 4 }, gap: 4 };
  const bands = [];
  lines.forEach((line, place) => {
    if (line.kind === "high") bands.push({ series: [place + 1, place + 2], fill: fade(line.colour, 0.16) });
  });
  return {
    width,
    height: HEIGHT,
    padding: [10, 12, 0, 0],
    legend: { show: false },
    scales: { x: { time: false, range: (plot, low, high) => rangeOfSteps(low, high) }, y: { range: rangeOf(chart) } },
    axes: [
      { ...axis, size: 26, values: (plot, splits) => splits.map((step) => (Number.isInteger(step) ? show(step) : "")) },
      { ...axis, size: 60, values: (plot, splits) => tickLabels(splits) },
    ],
    series: [{}, ...lines.map((line) => seriesOf(line, line.steps.length))],
    bands,
    cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
    hooks: {
      draw: [(plot) => drawVerdicts(plot, verdicts)],
      setCursor: [(plot) => told(plot.cursor.idx)],
      setSelect: [(plot) => selected(plot)],
    },
  };
}

function rangeOfSteps(low, high) {
  if (curves.zoom) return curves.zoom;
  return low === high ? [low - 1, high + 1] : [low, high];
}

function tickLabels(splits) {
  const labels = splits.map((value) => tick(value, splits));
  if (splits.length < 2 || new Set(labels).size === labels.length) return labels;
  const apart = Math.abs(splits[1] - splits[0]);
  const largest = Math.max(...splits.map(Math.abs));
  const decimals = Math.min(Math.max(Math.ceil(-Math.log10(apart)), 0), 12);
  const significant = Math.min(Math.max(Math.ceil(Math.log10(largest / apart)), 0), 12);
  const longer = (value) => (largest < 1e-3 ? value.toExponential(significant) : value.toFixed(decimals));
  return splits.map((value) => longer(value).replace(/^-/, MINUS));
}

function tick(value, splits) {
  const apart = splits.length > 1 ? Math.abs(splits[1] - splits[0]) : Math.abs(value);
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e4 || apart < 1e-4) return show(value);
  const exact = (digits) => splits.every((split) => Math.abs(split - Number(split.toFixed(digits))) < apart / 1000);
  const digits = [0, 1, 2, 3, 4, 5, 6].find(exact) ?? 6;
  return value.toFixed(digits).replace("-", MINUS);
}

function drawVerdicts(plot, verdicts) {
  const context = plot.ctx;
  const { left, top, width, height } = plot.bbox;
  context.save();
  context.lineWidth = devicePixelRatio;
  for (const verdict of verdicts) {
    context.strokeStyle = cssColour(verdict.level === "alarm" ? "--alarm" : "--warning");
    const x = plot.valToPos(verdict.step, "x", true);
    if (x >= left && x <= left + width) stroke(context, [x, top, x, top + height], [3, 3]);
    const y = verdict.metric.includes(":") ? NaN : plot.valToPos(verdict.threshold, "y", true);
    if (y >= top && y <= top + height) stroke(context, [left, y, left + width, y], [8, 5]);
  }
  context.restore();
}

function stroke(context, [x0, y0, x1, y1], dash) {
  context.setLineDash(dash.map((part) => part * devicePixelRatio));
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function selected(plot) {
  if (plot.select.width < 6) return;
  const [low, high] = [plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"));
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  zoomTo(high - low < 1 ? [low - 1, high + 1] : [low, high]);
}

function zoomTo(range) {
  curves.zoom = range;
  for (const { plot } of curves.plots.values()) {
    const steps = plot.data[0];
    plot.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
  }
  const reset = byId("zoom");
  if (reset) reset.disabled = !range;
}

function chartCard(chart, runs, verdicts) {
  const id = `chart-${chart.series[0][1].replace(/[^a-z0-9]+/gi, "-")}`;
  const legend = el("div", { class: "legend" });
  const meaning = el("p", { class: "meaning", id: `${id}-meaning`, hidden: true }, chart.meaning);
  const explain = chart.meaning && el("button", {
    class: "explain", type: "button", "aria-expanded": "false", "aria-controls": `${id}-meaning`,
    "aria-label": `What does ${chart.title} mean?`, title: chart.meaning,
    onclick: () => {
      meaning.hidden = !meaning.hidden;
      explain.setAttribute("aria-expanded", String(!meaning.hidden));
    },
  }, "?");
  const unit = { tokens: "tokens", seconds: "seconds", steps: "steps", share: "share" }[chart.unit];
  const place = el("div", {
    class: "plot", tabIndex: 0, role: "img", "aria-describedby": `${id}-now`,
    onkeydown: (event) => cursorByKeys(event, id),
    onblur: () => { now.setAttribute("aria-live", "off"); },
  });
  const now = el("span", { class: "unseen", id: `${id}-now` });
  const card = el("figure", { class: "chart", id }, el("span", { class: "of-group" }, chart.group),
    el("figcaption", {}, el("span", { class: "chart-title" }, plainName(chart.title)), unit && el("span", { class: "unit" }, unit), explain),
    legend, meaning, place, now);
  const drawn = { id, chart, card, legend, place, now, runs, verdicts };
  return drawn;
}

function drawChart(drawn) {
  const { chart, runs, place, id } = drawn;
  if (drawn.card.hidden) return;
  const old = curves.plots.get(id);
  if (old) old.plot.destroy();
  const lines = linesOf(chart, runs);
  const table = tableOf(lines);
  const metrics = new Set(chart.series.map(([, metric]) => metric));
  const verdicts = drawn.verdicts.filter((verdict) => metrics.has(verdict.metric.split(":")[0]));
  const told = (at) => tellValues(drawn, lines, table, at);
  const width = Math.max(place.clientWidth, 120);
  const plot = new uPlot(optionsOf(chart, lines, width, verdicts, told), table, place);
  plot.over.addEventListener("dblclick", () => zoomTo(null));
  curves.plots.set(id, { plot, drawn, width });
  place.setAttribute("aria-label", inWords(chart, lines));
  told(null);
}

function inWords(chart, lines) {
  const told = lines.filter((line) => line.kind === "line" || line.kind === "points").map((line) => {
    const known = line.values.map((value, at) => [line.steps[at], value]).filter(([, value]) => value !== null);
    if (!known.length) return "";
    const [first, last] = [known[0], known[known.length - 1]];
    return `${line.label}: ${show(first[1])} at step ${first[0]}, ${show(last[1])} at step ${last[0]}`;
  });
  return `${chart.title}. ${told.filter(Boolean).join("; ")}. Arrow keys go from step to step.`;
}

function tellValues(drawn, lines, table, at) {
  const [steps, ...columns] = table;
  const parts = [];
  lines.forEach((line, number) => {
    if (line.kind !== "line" && line.kind !== "points") return;
    const column = columns[number];
    let place = at === null || at === undefined ? column.length - 1 : at;
    while (place > 0 && column[place] === null) place -= 1;
    parts.push([line, column[place], steps[place]]);
  });
  const step = at === null || at === undefined ? null : steps[at];
  const alone = lines.filter((line) => line.kind === "line" || line.kind === "points").length === 1;
  fill(drawn.legend, parts.map(([line, value]) => {
    const swatch = el("i", { class: line.kind === "points" ? "swatch dotted" : "swatch", "aria-hidden": "true" });
    swatch.style.color = line.colour;
    return el("span", { class: "key" }, swatch, alone ? "" : `${line.label} `, el("b", {}, show(value)));
  }), el("span", { class: "at" }, step === null ? "latest" : `step ${step.toLocaleString("en")}`));
  drawn.now.textContent = `${step === null ? "Latest" : `Step ${step}`}: ${parts.map(([line, value]) => `${line.label} ${show(value)}`).join(", ")}`;
}

function cursorByKeys(event, id) {
  const held = curves.plots.get(id);
  if (!held || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
  event.preventDefault();
  if (event.key === "Escape") { zoomTo(null); return; }
  const { plot, drawn } = held;
  const last = plot.data[0].length - 1;
  const from = plot.cursor.idx === null || plot.cursor.idx === undefined ? last : plot.cursor.idx;
  const moved = event.key === "ArrowLeft" ? from - 1 : event.key === "ArrowRight" ? from + 1 : event.key === "Home" ? 0 : last;
  const to = Math.min(Math.max(moved, 0), last);
  drawn.now.setAttribute("aria-live", "polite");
  plot.setCursor({ left: plot.valToPos(plot.data[0][to], "x"), top: plot.over.clientHeight / 2 });
}

function renderCurves(data, runs) {
  const section = byId("curves");
  for (const { plot } of curves.plots.values()) plot.destroy();
  curves.plots.clear();
  const charts = chartsFor(data, runs);
  section.hidden = runs.every((run) => run.state === "empty" || run.state === "missing");
  const title = el("h2", { id: "curves-title" }, "Curves");
  if (!charts.length) {
    fill(section, title, el("p", { class: "empty" }, emptyCurves(runs)));
    curves.drawn = [];
    return;
  }
  const verdicts = runs.flatMap((run) => run.health);
  const offline = !runs.some((run) => run.online);
  const groups = offline ? ["Loss", ...data.groups.filter((name) => name !== "Loss")] : data.groups;
  curves.drawn = [];
  curves.drawn = groups.flatMap((group) => charts.filter((chart) => chart.group === group)).map((chart) => chartCard(chart, runs, verdicts));
  const spreads = el("div", { class: "spreads", id: "spreads" });
  fill(section, el("div", { class: "title-row" }, title, curveTools()),
    el("div", { class: "grid" }, curves.drawn.map((drawn) => drawn.card), spreads), moreCurves());
  foldCurves();
  curves.drawn.forEach(drawChart);
  renderSpreads(runs);
}

// On a phone every curve takes a screen: the first ones stand there, the others come when they are asked for.
const FEW_CURVES = 4;
const isNarrow = () => matchMedia("(max-width: 640px)").matches;

function moreCurves() {
  return el("button", { class: "more", id: "more-curves", type: "button", onclick: () => { curves.all = true; foldCurves(); curves.drawn.forEach(drawChart); } });
}

function foldCurves() {
  const folded = isNarrow() && !curves.all && curves.drawn.length > FEW_CURVES;
  curves.drawn.forEach((drawn, place) => { drawn.card.hidden = folded && place >= FEW_CURVES; });
  const button = byId("more-curves");
  button.hidden = !folded;
  button.textContent = `Show ${plural(curves.drawn.length - FEW_CURVES, "more curve")}`;
}

function emptyCurves(runs) {
  const failed = runs.find((run) => run.state === "failed");
  if (failed) return "The run ended before it logged anything.";
  if (runs.some((run) => run.state === "running")) return "Nothing has been logged yet. The first curve appears with the first log (logging_steps).";
  return "There is nothing to draw: no metrics were logged in this folder.";
}

function curveTools() {
  const told = el("output", { htmlFor: "smooth" }, curves.smooth ? curves.smooth.toFixed(2) : "off");
  const slider = el("input", {
    id: "smooth", type: "range", min: 0, max: 0.95, step: 0.05, value: curves.smooth,
    oninput: () => {
      curves.smooth = Number(slider.value);
      told.textContent = curves.smooth ? curves.smooth.toFixed(2) : "off";
      curves.drawn.forEach(drawChart);
    },
  });
  const reset = el("button", { id: "zoom", type: "button", disabled: !curves.zoom, onclick: () => zoomTo(null) }, "Reset zoom");
  return el("div", { class: "tools" }, el("label", {}, "Smoothing ", slider, told), reset,
    el("span", { class: "hint" }, "Drag across a curve to zoom in."));
}

function updateCurves(data, runs) {
  const charts = chartsFor(data, runs);
  const same = charts.length === curves.drawn.length
    && curves.drawn.every((drawn) => charts.some((chart) => chart.title === drawn.chart.title && chart.group === drawn.chart.group
      && chart.series.length === drawn.chart.series.length && chart.held_out.length === drawn.chart.held_out.length));
  if (!same || !charts.length) { renderCurves(data, runs); return; }
  const verdicts = runs.flatMap((run) => run.health);
  renderSpreads(runs);
  for (const drawn of curves.drawn) {
    drawn.chart = charts.find((chart) => chart.title === drawn.chart.title && chart.group === drawn.chart.group);
    drawn.runs = runs;
    drawn.verdicts = verdicts;
    drawChart(drawn);
  }
}

new ResizeObserver(() => {
  for (const held of curves.plots.values()) {
    const width = held.drawn.place.clientWidth;
    if (width && width !== held.width) {
      held.width = width;
      held.plot.setSize({ width, height: HEIGHT });
    }
  }
}).observe(document.body);
