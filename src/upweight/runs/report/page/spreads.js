"use strict";
// How rewards and lengths of completions are spread, step by step: a column for each file of completions.

const BINS = 14;
const SPREADS = [["rewards", "Rewards of completions", "Each column is a step; the darker a field, the more completions have a reward there."],
  ["lengths", "Lengths of completions", "Each column is a step; the darker a field, the more completions have a length there, in tokens."]];

function renderSpreads(runs) {
  const place = byId("spreads");
  if (!place) return;
  fill(place, runs.flatMap((run, number) => SPREADS.map(([kind, title, meaning]) => spreadCard(run, number, kind, title, meaning, runs.length > 1))));
  place.hidden = !place.childElementCount;
}

function spreadCard(run, number, kind, title, meaning, several) {
  const parts = run.completions.filter((part) => part.set === "" && part[kind].length);
  const values = parts.flatMap((part) => part[kind]);
  if (parts.length < 2) return null;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const card = (...shown) => el("figure", { class: "chart spread" }, el("span", { class: "of-group" }, several ? run.name : "Completions"),
    el("figcaption", {}, el("span", { class: "chart-title" }, title), kind === "lengths" && el("span", { class: "unit" }, "tokens")), shown);
  if (low === high) return card(el("p", { class: "constant" }, el("b", {}, show(low)), ` for every completion, in all ${parts.length} steps that are shown`));
  const size = (high - low) / BINS;
  const bin = (value) => Math.min(Math.floor((value - low) / size), BINS - 1);
  const counts = parts.map((part) => {
    const column = new Array(BINS).fill(0);
    part[kind].forEach((value) => { column[bin(value)] += 1; });
    return column.map((count) => count / part[kind].length);
  });
  const words = `${title}: from ${show(low)} to ${show(high)} in ${plural(parts.length, "step")}; at step ${parts[parts.length - 1].step} the middle is ${show(middleOf(parts[parts.length - 1][kind]))}`;
  return card(el("p", { class: "meaning" }, meaning), spreadPlot(parts, counts, { low, high, size, colour: runColour(several ? number : 0), words }));
}

const middleOf = (values) => values.slice().sort((one, other) => one - other)[Math.floor(values.length / 2)];

function svg(tag, options, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(options).forEach(([name, value]) => node.setAttribute(name, value));
  return append(node, children);
}

function spreadPlot(parts, counts, { low, high, size, colour, words }) {
  const [left, top, width, height] = [46, 4, 330, 150];
  const across = width / parts.length;
  const fields = counts.flatMap((column, place) => column.map((part, row) => part > 0 && svg("rect", {
    x: left + place * across, y: top + (BINS - 1 - row) * (height / BINS), width: Math.max(across - 0.6, 0.6), height: height / BINS - 0.6,
    fill: colour, "fill-opacity": (0.12 + 0.88 * part).toFixed(3),
  }, svg("title", {}, `step ${parts[place].step}: ${share(part)} from ${show(low + row * size)} to ${show(low + (row + 1) * size)}`))));
  const label = (x, y, text, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);
  return svg("svg", { class: "bars", viewBox: `0 0 ${left + width + 8} ${top + height + 20}`, role: "img", "aria-label": words },
    fields, label(left - 6, top + 10, show(high), "end"), label(left - 6, top + height, show(low), "end"),
    label(left, top + height + 15, String(parts[0].step), "start"), label(left + width, top + height + 15, `step ${parts[parts.length - 1].step}`, "end"));
}
