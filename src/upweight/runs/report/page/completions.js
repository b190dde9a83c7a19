"use strict";
// What the model wrote: by step, sorted, filtered, token by token.

const reading = { set: null, step: null, run: "all", sort: "reward", colour: "none", grouped: true, filter: "", everywhere: false, shown: 12 };
const MORE = 12;

const SORTS = [
  ["reward", "Highest reward", (row) => -(row.reward ?? -Infinity)],
  ["worst", "Lowest reward", (row) => row.reward ?? Infinity],
  ["advantage", "Highest advantage", (row) => -(row.advantage ?? -Infinity)],
  ["long", "Longest", (row) => -(row.tokens ?? 0)],
  ["short", "Shortest", (row) => row.tokens ?? 0],
  ["order", "As sampled", () => 0],
];

const BY_REWARD = ["reward", "worst", "advantage"];

const COLOURS = {
  none: ["Nothing", ""],
  logp: ["Log-prob", "How likely the sampler found each token: the stronger, the more surprising."],
  ratio: ["Log-ratio", "Trainer against sampler: blue where the trainer finds a token likelier, red where less likely."],
  advantage: ["Advantage", "Green tokens are made likelier by this step, red ones less likely; what an environment wrote has no colour."],
};

function partsOf(runs) {
  return runs.flatMap((run, number) => run.completions.map((part) => ({ ...part, run: number })));
}

function renderCompletions(runs) {
  const section = byId("completions");
  const parts = partsOf(runs);
  const online = runs.some((run) => run.online);
  section.hidden = !online && !parts.length;
  if (section.hidden) { fill(section); return; }
  const title = el("h2", { id: "completions-title" }, "Completions");
  if (!parts.length) {
    fill(section, title, el("p", { class: "empty" }, runs.some((run) => run.state === "running")
      ? "Nothing has been written yet. The first rollout appears here as soon as it is scored."
      : "This folder holds no completions."));
    return;
  }
  const sets = [...new Set(parts.map((part) => part.set))].sort();
  if (!sets.includes(reading.set)) { reading.set = sets[0]; reading.step = null; }
  const list = el("div", { class: "written", id: "written", onkeydown: stepByKeys });
  fill(section, el("div", { class: "title-row" }, title), completionTools(runs, sets), el("p", {
    class: "count", id: "written-count", "aria-live": "polite",
  }), list);
  renderWritten();
}

const stepsOf = () => [...new Set(partsOf(state.runs).filter((part) => part.set === reading.set).map((part) => part.step))]
  .sort((one, other) => one - other);

function completionTools(runs, sets) {
  const select = (id, label, options, value, change) => el("label", { class: "field" }, el("span", {}, label),
    el("select", { id, onchange: (event) => { change(event.target.value); renderWritten(); } },
      options.map(([name, text]) => el("option", { value: name, selected: name === value }, text))));
  const sorts = SORTS.filter(([name]) => !BY_REWARD.includes(name) || runs.some((run) => run.online));
  if (!sorts.some(([name]) => name === reading.sort)) reading.sort = "order";
  const tools = [
    sets.length > 1 && select("which-set", "Of", sets.map((name) => [name, setName(name)]), reading.set, (value) => {
      reading.set = value;
      reading.step = null;
    }),
    runs.length > 1 && select("which-run", "Run", [["all", "All runs"], ...runs.map((run, number) => [String(number), run.name])],
      reading.run, (value) => { reading.run = value; }),
    select("sort", "Sort", sorts, reading.sort, (value) => { reading.sort = value; }),
    select("colour", "Colour tokens by", Object.entries(COLOURS).map(([name, [text]]) => [name, text]), reading.colour,
      (value) => { reading.colour = value; }),
    el("label", { class: "field grow" }, el("span", {}, "Filter"), el("input", {
      id: "filter", type: "search", placeholder: "Words to look for", value: reading.filter, autocomplete: "off",
      oninput: (event) => { reading.filter = event.target.value; reading.shown = MORE; renderWritten(); },
    })),
    el("label", { class: "check" }, el("input", {
      id: "everywhere", type: "checkbox", checked: reading.everywhere,
      onchange: (event) => { reading.everywhere = event.target.checked; reading.shown = MORE; renderWritten(); },
    }), " In all steps"),
    el("label", { class: "check" }, el("input", {
      id: "grouped", type: "checkbox", checked: reading.grouped,
      onchange: (event) => { reading.grouped = event.target.checked; renderWritten(); },
    }), " Side by side for each prompt"),
  ];
  const slider = el("input", {
    id: "step", type: "range", min: 0, step: 1, "aria-label": "Step",
    oninput: (event) => { goTo(stepsOf()[Number(event.target.value)]); },
  });
  const button = (label, text, by) => el("button", { class: "arrow", type: "button", "aria-label": label, onclick: () => move(by) }, text);
  return el("div", { class: "panel" },
    el("div", { class: "stepper" }, button("Earlier step", "\u2190", -1), slider, button("Later step", "\u2192", 1),
      el("output", { id: "step-now", htmlFor: "step" })),
    el("div", { class: "fields" }, tools));
}

function goTo(step) {
  const steps = stepsOf();
  reading.step = step === steps[steps.length - 1] ? null : step; // null follows the newest
  reading.shown = MORE;
  renderWritten();
}

function move(by) {
  const steps = stepsOf();
  const at = reading.step === null ? steps.length - 1 : steps.indexOf(reading.step);
  goTo(steps[Math.min(Math.max(at + by, 0), steps.length - 1)]);
}

function stepByKeys(event) {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  event.preventDefault();
  move(event.key === "ArrowLeft" ? -1 : 1);
}

function rowsNow(step) {
  const chosen = partsOf(state.runs).filter((part) => part.set === reading.set
    && (reading.run === "all" || state.runs.length === 1 || Number(reading.run) === part.run));
  // Runs that are compared need not have written at the same steps: each shows what it wrote last by then.
  const last = (own) => own.filter((part) => part.step <= step).pop() || own[0];
  const parts = step === null ? chosen
    : state.runs.map((run, number) => last(chosen.filter((part) => part.run === number))).filter(Boolean);
  return { rows: parts.flatMap((part) => part.rows.map((row) => ({ ...row, run: part.run, step: part.step }))), total: parts.reduce((sum, part) => sum + part.total, 0) };
}

function textOf(row) {
  const said = [...(row.messages || []), ...(row.prompt || []), ...(row.completion || [])].map((message) => message.content);
  return [...said, ...Object.values(row.columns || {}).map((value) => (typeof value === "string" ? value : JSON.stringify(value)))].join("\n").toLowerCase();
}

function renderWritten() {
  const list = byId("written");
  if (!list) return;
  const steps = stepsOf();
  const step = reading.step !== null && steps.includes(reading.step) ? reading.step : steps[steps.length - 1];
  const slider = byId("step");
  slider.max = String(steps.length - 1);
  slider.value = String(steps.indexOf(step));
  slider.disabled = steps.length < 2;
  slider.setAttribute("aria-valuetext", `step ${step}`);
  byId("step-now").textContent = reading.set === "" ? `Step ${step.toLocaleString("en")}` : `After step ${step.toLocaleString("en")}`;
  const wanted = reading.filter.trim().toLowerCase();
  const all = reading.everywhere && wanted !== "";
  const { rows, total } = rowsNow(all ? null : step);
  const found = wanted ? rows.filter((row) => textOf(row).includes(wanted)) : rows;
  const by = SORTS.find(([name]) => name === reading.sort)[2];
  const sorted = found.map((row, place) => [by(row), place, row]).sort((one, other) => one[0] - other[0] || one[1] - other[1]).map(([, , row]) => row);
  const largest = Math.max(...rows.flatMap((row) => [row.advantage || 0, ...(row.token_advantages || [])]).map(Math.abs), 1e-9);
  const groups = grouped(sorted);
  const now = groups.slice(0, Math.ceil((reading.grouped ? reading.shown / 3 : reading.shown) / (isNarrow() ? 2 : 1)));
  const kept = total > rows.length ? ` (the run wrote ${total.toLocaleString("en")})` : "";
  byId("written-count").textContent = wanted ? `${found.length} of ${plural(rows.length, "completion")} ${all ? `of ${plural(steps.length, "step")} ` : ""}hold \u201c${reading.filter.trim()}\u201d`
    : `${plural(rows.length, "completion")} of ${plural(new Set(rows.map(promptKey)).size, "prompt")}${kept}`;
  const hint = COLOURS[reading.colour][1];
  const missing = reading.colour !== "none" && !found.some((row) => tokenValues(row, reading.colour, largest));
  fill(list,
    reading.colour !== "none" && el("p", { class: "hint" }, missing ? missingColour() : hint),
    found.length ? now.map((group) => groupCard(group, wanted, largest)) : el("p", { class: "empty" }, wanted ? `No completion of ${all ? "any" : "this"} step holds these words.` : "Nothing was written in this step."),
    now.length < groups.length && el("button", { class: "more", type: "button", onclick: () => { reading.shown += 2 * MORE; renderWritten(); } },
      `Show more (${plural(groups.length - now.length, reading.grouped ? "prompt" : "completion")} left)`));
}

function missingColour() {
  if (reading.colour === "ratio") return "The trainer's own log-probs are known only where one rollout feeds several steps (trl.num_iterations, a larger generation batch).";
  return reading.set === "" ? "This file does not hold its completions token by token." : "Evaluations are not trained on: they have no advantages.";
}

const promptKey = (row) => JSON.stringify([row.prompt || (row.messages || []).slice(0, 1), row.images || []]);

function picturesOf(row, digests, words) {
  const known = state.runs[row.run].pictures || {};
  const shown = (digests || []).filter((digest) => known[digest]);
  return shown.length > 0 && el("div", { class: "pictures" }, shown.map((digest) => el("img", { src: known[digest], alt: words, title: words })));
}

function grouped(rows) {
  if (!reading.grouped) return rows.map((row) => [row]);
  const groups = new Map();
  for (const row of rows) {
    const key = `${reading.everywhere && reading.filter.trim() ? row.step : ""}${promptKey(row)}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups.values()];
}

function groupCard(rows, wanted, largest) {
  const first = rows[0];
  const common = Object.entries(first.columns || {}).filter(([name, value]) =>
    rows.every((row) => JSON.stringify((row.columns || {})[name]) === JSON.stringify(value)));
  const shared = new Set(common.map(([name]) => name));
  return el("article", { class: "prompt-group" },
    el("div", { class: "prompt" }, picturesOf(first, first.images, "image of the prompt"), (first.prompt || []).map((message) => bubble(message, wanted)), columnsOf(common, "of the row")),
    el("div", { class: rows.length > 1 ? "answers" : "answers one", tabIndex: rows.length > 1 ? 0 : undefined },
      folded(rows).map(([row, count]) => answerCard(row, wanted, largest, shared, count))));
}

// Completions that are word for word alike and score alike, once, with their number.
function folded(rows) {
  const alike = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.run, row.step, row.messages, row.completion, row.observed_images, row.rewards, row.advantage, row.finished, row.failure]);
    if (alike.has(key)) alike.get(key)[1] += 1;
    else alike.set(key, [row, 1]);
  }
  return [...alike.values()];
}

function columnsOf(columns, words) {
  if (!columns.length) return null;
  return el("details", { class: "columns" }, el("summary", {}, `${plural(columns.length, "column")} ${words}`),
    el("dl", {}, columns.map(([name, value]) => [el("dt", {}, name), el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])));
}

function bubble(message, wanted, body) {
  return el("div", { class: `message role-${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"}` },
    el("span", { class: "role" }, message.role), el("div", { class: "said" }, body || marked(message.content, wanted)));
}

function answerCard(row, wanted, largest, shared, count) {
  const several = state.runs.length > 1;
  const chips = Object.entries(row.rewards || {}).map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", {}, show(value))));
  const swatch = several && el("i", { class: "swatch", "aria-hidden": "true" });
  if (swatch) swatch.style.color = runColour(row.run);
  const head = el("header", {},
    swatch, several && el("span", { class: "of" }, state.runs[row.run].name),
    count > 1 && el("span", { class: "tag times", title: "So many completions are word for word the same and score alike" }, `\u00d7 ${count}`),
    (several || (reading.everywhere && reading.filter.trim())) && el("span", { class: "small" }, `step ${row.step}`),
    row.reward !== undefined && el("span", { class: "score", title: "Reward: the sum, by weight" }, show(row.reward)),
    row.advantage !== undefined && el("span", { class: `advantage ${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : ""}`, title: "Advantage: how much better than its group" },
      `${row.advantage > 0 ? "\u25b2" : row.advantage < 0 ? "\u25bc" : ""} ${signed(row.advantage)}`),
    row.tokens !== undefined && el("span", { class: "small" }, plural(row.tokens, "token")),
    row.finished === false && el("span", { class: "tag", title: "Did not end by itself" }, "cut off"),
    row.failure !== undefined && el("span", { class: "tag", title: "Its environment broke: nothing is learned from it" }, `masked: ${row.failure}`));
  const messages = row.messages || row.completion || [];
  const tokens = tokenised(row, largest);
  const body = tokens && !wanted ? [bubble({ role: "assistant" }, "", tokens)]
    : messages.length ? messages.map((message) => bubble(message, wanted)) : [el("p", { class: "empty" }, "An empty answer.")];
  return el("div", { class: "answer" }, head, chips.length > 1 && el("div", { class: "chips" }, chips), el("div", { class: "talk" }, body),
    picturesOf(row, row.observed_images, "image that a tool or the environment returned"),
    columnsOf(Object.entries(row.columns || {}).filter(([name]) => !shared.has(name)), "of its own"));
}

function marked(text, wanted) {
  if (!text) return el("span", { class: "small" }, "(nothing)");
  if (!wanted) return text;
  const parts = [];
  const lower = text.toLowerCase();
  if (lower.length !== text.length) return text;
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return el("span", {}, parts, text.slice(from));
}

// For each token a strength between -1 and 1 (null: none) and what it says; undefined where it is not known.
function tokenValues(row, by, largest) {
  if (by === "none" || !row.token_texts) return undefined;
  const own = (place) => !row.sampled || row.sampled[place];
  if (by === "advantage") {
    if (row.advantage === undefined) return undefined;
    const advantage = (place) => (row.token_advantages ? row.token_advantages[place] : row.advantage);
    return row.token_texts.map((text, place) => [own(place) ? advantage(place) / largest : null, `advantage ${signed(advantage(place))}`]);
  }
  const logps = row.sampler_logps;
  if (!logps || (by === "ratio" && !row.policy_logps)) return undefined;
  return logps.map((logp, place) => {
    if (!own(place) || logp === null) return [null, "written by the environment"];
    if (by === "logp") return [Math.min(-logp / 4, 1), `log-prob ${show(logp)}, ${share(Math.exp(logp))}`];
    const ratio = row.policy_logps[place] === null ? 0 : row.policy_logps[place] - logp;
    return [Math.max(-1, Math.min(1, ratio / 0.5)), `log-ratio ${signed(ratio)}`];
  });
}

function tokenised(row, largest) {
  const values = tokenValues(row, reading.colour, largest);
  if (!values) return null;
  const ends = { logp: ["--surprise", "--surprise"], ratio: ["--cold", "--hot"], advantage: ["--good", "--bad"] }[reading.colour].map(cssColour);
  return row.token_texts.map((text, place) => {
    const [strength, says] = values[place];
    const span = el("span", { class: strength === null ? "token foreign" : "token", title: says }, text);
    if (strength) span.style.backgroundColor = fade(strength > 0 ? ends[0] : ends[1], 0.08 + 0.5 * Math.abs(strength));
    return span;
  });
}
