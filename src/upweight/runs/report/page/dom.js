"use strict";
// Elements and numbers. Text reaches the page as text nodes only: completions are whatever a model wrote.

const byId = (id) => document.getElementById(id);

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && !name.startsWith("aria") && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") {
      node.append(child instanceof Node ? child : String(child));
    }
  }
  return node;
}

function fill(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

const MINUS = "\u2212";

function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1e9) text = power(size);
  else if (size >= 1e6) text = `${trim((size / 1e6).toPrecision(3))}\u2009M`;
  else if (size >= 1e4) text = `${trim((size / 1e3).toPrecision(3))}\u2009k`;
  else if (size >= 100) text = Math.round(size).toLocaleString("en");
  else if (size >= 0.001) text = trim(size.toPrecision(3));
  else text = power(size);
  return value < 0 && text !== "0" ? MINUS + text : text;
}

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function power(size) {
  const [digits, exponent] = size.toExponential(1).split("e");
  return `${trim(digits)}e${exponent.replace("-", MINUS).replace("+", "")}`;
}

function signed(value) {
  return value > 0 ? `+${show(value)}` : show(value);
}

function share(value) {
  return value === null || value === undefined ? "\u2013" : `${trim((100 * value).toPrecision(3))}\u2009%`;
}

const plural = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many || `${one}s`}`;

function duration(seconds) {
  if (seconds < 1) return "under a second";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function when(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

function setName(name) {
  if (name === "") return "Training";
  if (name === "eval") return "Held out";
  return `Held out: ${name.replace(/^eval_/, "")}`;
}

const METRIC_WORDS = {
  reward: "reward", loss: "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin",
  mean_token_accuracy: "token accuracy", "completions/mean_length": "completion length (tokens)",
  "completions/clipped_ratio": "cut at the length limit",
};

function metricWords(name) {
  if (METRIC_WORDS[name]) return METRIC_WORDS[name];
  const reward = /^rewards\/(.+)\/(mean|pass@\d+)$/.exec(name);
  if (reward && reward[2] === "mean") return reward[1];
  if (reward && reward[2] === "pass@1") return `${reward[1]}: completions above 0 (pass@1)`;
  if (reward) return `${reward[1]}: prompts with any of ${reward[2].slice(5)} above 0 (${reward[2]})`;
  return name;
}

// A metric that no chart names, in words: `my_metric/of` is "my metric, of".
function plainName(name) {
  return /^[a-z0-9_./@-]+$/.test(name) ? name.replace(/\//g, ", ").replace(/_/g, " ") : name;
}

// A colour of the page as six digits; it stands there for both themes.
function cssColour(name) {
  const [light, dark] = getComputedStyle(document.documentElement).getPropertyValue(name).match(/#\w+/g);
  return themeNow() === "dark" ? dark : light;
}

const runColour = (place) => cssColour(`--series-${(place % 6) + 1}`);
