"use strict";
// The head of the page, verdicts, held-out results, config.

const STATES = {
  running: ["Running", "going"], done: ["Finished", "good"], stopped: ["Stopped", "warn"], failed: ["Failed", "bad"],
  killed: ["Killed", "bad"], recorded: ["Recorded", ""], empty: ["Empty", ""], missing: ["Not there yet", ""],
};

const STATE_WORDS = {
  stopped: "It was stopped by hand or by a signal.",
  killed: "Its process is gone, and it did not end by itself: it was killed, its disk was full, or the machine went down.",
  empty: "This folder holds no run. A run's folder is the output_dir of its config; upweight train CONFIG fills it.",
  missing: "There is no such folder yet. This page fills as soon as training begins.",
};

const TILES = ["reward", "eval_reward", "loss", "eval_loss", "rewards/accuracies", "rewards/margins", "margin", "accuracy", "mean_token_accuracy",
  "kl", "entropy", "sampling/entropy", "completions/mean_length", "grad_norm", "tokens_per_second"];
const TILE_WORDS = {
  reward: "Reward", eval_reward: "Held-out reward", loss: "Loss", eval_loss: "Held-out loss", "rewards/accuracies": "Accuracy",
  "rewards/margins": "Margin", margin: "Margin", accuracy: "Accuracy", mean_token_accuracy: "Token accuracy", kl: "KL", entropy: "Entropy",
  "sampling/entropy": "Entropy of the sampler", "completions/mean_length": "Tokens of a completion", grad_norm: "Gradient norm", tokens_per_second: "Tokens per second",
};
const UP = /reward|accurac|margin|pass@/;
const DOWN = /loss/;

// Without a throughput of 0: a step whose completions all score alike trains on nothing, which says nothing of the speed.
function known(run, metric) {
  const held = metric.startsWith("eval_");
  const values = (held ? run.evaluated : run.metrics)[metric] || [];
  const steps = held ? run.eval_steps : run.steps;
  return values.map((value, at) => [steps[at], value]).filter(([, value]) => value !== null && !(metric === "tokens_per_second" && value === 0));
}

function tilesOf(run) {
  const wanted = run.online ? TILES.filter((name) => name !== "loss" && name !== "grad_norm") : TILES;
  const found = wanted.filter((name) => known(run, name).length);
  return found.filter((name) => name !== "sampling/entropy" || !found.includes("entropy")).slice(0, 6);
}

function renderHead(data, runs) {
  const { kind } = data;
  const run = runs[0];
  document.title = `${data.title} \u00b7 Upweight`;
  const lead = kind === "comparison" ? "Comparison" : kind === "stages" ? "Training in stages" : run.method || "Run";
  fill(byId("head"),
    el("p", { class: "lead" }, lead),
    el("h1", {}, data.title),
    kind === "comparison" ? comparisonOf(runs) : kind === "stages" ? stagesOf(data) : null,
    kind !== "comparison" && [standing(run), messageOf(run), tileRow(run)]);
}

function pill(run) {
  const [text, tone] = STATES[run.state];
  return el("span", { class: `pill ${tone}` }, el("i", { "aria-hidden": "true" }), text);
}

function standing(run) {
  const steps = run.max_steps && run.state !== "done" ? `step ${run.step.toLocaleString("en")} of ${run.max_steps.toLocaleString("en")}` : plural(run.step, "step");
  const until = run.ended || (run.state === "running" ? Date.now() / 1000 : null);
  const took = run.started && until ? until - run.started : null;
  const trained = run.step - run.resumed_step;
  const left = run.state === "running" && trained > 0 && run.max_steps && took ? (took / trained) * (run.max_steps - run.step) : null;
  const parts = [
    run.step > 0 || run.state === "running" ? steps : null,
    took !== null && duration(took) + (run.resumed_step ? ` since step ${run.resumed_step.toLocaleString("en")}` : ""),
    left !== null && `about ${duration(left)} left`,
    run.started && `${run.resumed_step ? "resumed" : "begun"} ${when(run.started)}`,
  ].filter(Boolean);
  return el("p", { class: "standing" }, pill(run), el("span", {}, parts.join(" \u00b7 ")));
}

function messageOf(run) {
  if (run.message) return el("div", { class: "message-box", role: "alert" }, el("strong", {}, "Why it failed"), el("pre", {}, run.message),
    run.advice && el("p", {}, el("strong", {}, "Once the cause is corrected: "), code(`${run.advice}.`)));
  return STATE_WORDS[run.state] ? el("p", { class: "note" }, STATE_WORDS[run.state], " ", code(sentence(run.advice))) : null;
}

function tileRow(run) {
  const names = tilesOf(run);
  if (!names.length) return null;
  return el("dl", { class: "tiles" }, names.map((name) => {
    const values = known(run, name);
    const [first, last] = [values[0], values[values.length - 1]];
    const moved = last[1] - first[1];
    const tone = moved === 0 ? "" : UP.test(name) ? (moved > 0 ? "up" : "down") : DOWN.test(name) ? (moved < 0 ? "up" : "down") : "";
    return el("div", { class: "tile" }, el("dt", {}, TILE_WORDS[name]), el("dd", {}, el("span", { class: "big" }, show(last[1])),
      el("span", { class: `small ${tone}` }, values.length > 1 ? `from ${show(first[1])} at step ${first[0]}` : `at step ${last[0]}`)));
  }));
}

function comparisonOf(runs) {
  const names = Object.groupBy(new Set(runs.flatMap(tilesOf)), (name) => TILE_WORDS[name]); // methods differ in the name of a measure
  return el("div", { class: "scroll" }, el("table", { class: "compare" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "Metric")), runs.map((run, number) => {
      const swatch = el("i", { class: "swatch", "aria-hidden": "true" });
      swatch.style.color = runColour(number);
      return el("th", { scope: "col" }, swatch, run.name);
    }))),
    el("tbody", {},
      el("tr", {}, el("th", { scope: "row" }, "State"), runs.map((run) => el("td", {}, pill(run)))),
      el("tr", {}, el("th", { scope: "row" }, "Method"), runs.map((run) => el("td", {}, run.method || "\u2013"))),
      el("tr", {}, el("th", { scope: "row" }, "Steps"), runs.map((run) => el("td", {}, run.step.toLocaleString("en")))),
      Object.entries(names).map(([words, same]) => el("tr", {}, el("th", { scope: "row" }, words), runs.map((run) => {
        const values = same.map((name) => known(run, name)).find((logged) => logged.length);
        if (!values) return el("td", {}, "\u2013");
        return el("td", {}, el("b", {}, show(values[values.length - 1][1])), el("span", { class: "small" }, ` from ${show(values[0][1])}`));
      }))))));
}

function stagesOf(data) {
  return el("div", { class: "stages", role: "group", "aria-label": "Stages" }, data.runs.map((run, number) => {
    const name = tilesOf(run)[0];
    const values = name ? known(run, name) : [];
    const words = values.length ? `${TILE_WORDS[name]} ${show(values[0][1])} \u2192 ${show(values[values.length - 1][1])}` : "nothing logged";
    return el("button", { type: "button", class: "stage", "aria-pressed": String(number === state.stage), onclick: () => { chooseStage(number); } },
      el("span", { class: "stage-name" }, run.name), el("span", { class: "small" }, `${run.method} \u00b7 ${plural(run.step, "step")} \u00b7 ${STATES[run.state][0].toLowerCase()}`),
      el("span", { class: "small" }, words));
  }));
}

function renderSections() {
  const links = [["health", "Health"], ["held-out", "Before and after"], ["curves", "Curves"], ["completions", "Completions"], ["config", "Config and data"]]
    .filter(([id]) => !byId(id).hidden);
  byId("sections").hidden = !links.length;
  whenChanged("sections", links, () => fill(byId("sections"), links.map(([id, text]) => el("a", { href: `#${id}` }, text))));
}

const RELATIONS = { above: ">", below: "<", near: "within" };

function evidence(verdict) {
  const limit = `${RELATIONS[verdict.relation] || ""} ${show(verdict.threshold)}${verdict.relation === "near" ? " of 0" : ""}`;
  return `${verdict.metric} ${show(verdict.value)} (${limit}) for ${plural(verdict.steps || 1, "step")}`;
}

function settingCard(warning, run, several) {
  const [key, ...text] = warning.split(": ");
  return el("li", { class: "verdict warning" },
    el("div", { class: "verdict-head" }, el("span", { class: "level" }, "Warning"), el("h3", {}, el("code", {}, key)),
      several && el("span", { class: "small" }, run.name)),
    el("p", {}, code(sentence(text.join(": ")))));
}

function verdictCard(verdict, run, several) {
  const metric = String(verdict.metric || "").split(":")[0];
  const chart = curves.drawn.find((drawn) => drawn.chart.series.some(([, name]) => name === metric));
  return el("li", { class: `verdict ${verdict.level === "alarm" ? "alarm" : "warning"}` },
    el("div", { class: "verdict-head" }, el("span", { class: "level" }, verdict.level === "alarm" ? "Alarm" : "Warning"),
      el("h3", {}, sentence(verdict.name).slice(0, -1).replace(/^Kl\b/, "KL")), el("span", { class: "small" }, `${several ? `${run.name}, ` : ""}step ${verdict.step}`)),
    el("p", {}, sentence(verdict.meaning)),
    el("p", { class: "evidence" }, el("code", {}, evidence(verdict)),
      chart && el("button", { class: "link", type: "button", onclick: () => showChart(chart) }, "Show the curve")),
    el("p", { class: "remedy" }, el("strong", {}, "Remedy: "), code(`${verdict.remedy}.`)));
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "");

function code(text) {
  return text.split("`").map((part, place) => (place % 2 ? el("code", {}, part) : part));
}

function showChart(drawn) {
  if (drawn.card.hidden) {
    curves.all = true;
    foldCurves();
    curves.drawn.forEach(drawChart);
  }
  drawn.card.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  drawn.place.focus({ preventScroll: true });
  drawn.card.classList.add("found");
  setTimeout(() => drawn.card.classList.remove("found"), 2000);
}

function renderHealth(data, runs) {
  const section = byId("health");
  const all = runs.flatMap((run) => run.health.map((verdict) => [verdict, run]));
  const logged = runs.some((run) => run.steps.length);
  const ended = runs.some((run) => run.state === "failed" || run.state === "killed");
  const ofSettings = runs.flatMap((run) => run.warnings.map((warning) => settingCard(warning, run, runs.length > 1)));
  section.hidden = !logged && !all.length && !ofSettings.length;
  if (section.hidden) { fill(section); return; }
  const alarms = (verdict) => (verdict.level === "alarm" ? 0 : 1);
  all.sort(([one], [other]) => alarms(one) - alarms(other) || other.step - one.step);
  const alarmsWait = runs.some((run) => run.too_early.some((rule) => rule.level === "alarm"));
  const early = runs.map((run) => earlyNote(run, runs.length > 1)).filter(Boolean);
  fill(section, el("h2", { id: "health-title" }, "Health"),
    ofSettings.length > 0 && el("ul", { class: "verdicts" }, ofSettings),
    all.length ? el("ul", { class: "verdicts" }, all.map(([verdict, run]) => verdictCard(verdict, run, runs.length > 1)))
      : ended ? el("p", { class: "well" }, "No rule had spoken before the run broke off.")
        : !alarmsWait && el("p", { class: "well good" }, `No verdicts. What was logged has been held against ${data.rules} rules for runs that go wrong, and none applies.`),
    early);
}

function earlyNote(run, several) {
  const waiting = run.too_early;
  if (!waiting.length) return null;
  return el("p", { class: "well" }, el("strong", {}, "Too early: "), several && `${run.name}: `,
    `${plural(run.step, "step")} ${run.step === 1 ? "is" : "are"} too few for ${plural(waiting.length, "rule")}. In brackets the step from which each can judge: `,
    `${waiting.map((rule) => `${rule.name} (${rule.step})`).join(", ")}.`);
}

function renderHeldOut(runs) {
  const section = byId("held-out");
  const found = runs.flatMap((run) => run.held_out.map((part) => [run, part]));
  section.hidden = !found.length;
  if (section.hidden) { fill(section); return; }
  fill(section, el("h2", { id: "held-out-title" }, "Before and after"),
    el("p", { class: "hint" }, "The first evaluation on rows that were not trained on, against the last.",
      found.some(([, part]) => part.lines[0].first > 0) && " The model before training was not evaluated: eval_on_start: true does that."),
    found.map(([run, part]) => {
      const words = [runs.length > 1 && run.name, part.set].filter(Boolean).join(", ");
      const [first, last] = [part.lines[0].first, part.lines[0].last];
      return el("div", { class: "held" }, words && el("h3", {}, words),
        el("div", { class: "scroll" }, el("table", {},
          el("thead", {}, el("tr", {}, ["Metric", `Step ${first}`, `Step ${last}`, "Change"].map((text) => el("th", { scope: "col" }, text)))),
          el("tbody", {}, part.lines.map(changeRow)))),
        answersOf(run, part));
    }));
}

function changeRow(line) {
  const moved = line.after - line.before;
  const better = UP.test(line.metric) ? moved > 0 : DOWN.test(line.metric) ? moved < 0 : null;
  const tone = better === null || moved === 0 ? "" : better ? "up" : "down";
  return el("tr", {}, el("th", { scope: "row" }, metricWords(line.metric)), el("td", {}, show(line.before)), el("td", {}, el("b", {}, show(line.after))),
    el("td", { class: tone }, signed(moved)));
}

function answersOf(run, part) {
  const wanted = part.set ? [part.set, `eval_${part.set}`] : ["eval"];
  const files = run.completions.filter((one) => wanted.includes(one.set));
  if (files.length < 2) return null;
  const by = (file) => new Map(file.rows.slice().reverse().map((row) => [row.row ?? promptKey(row), row]));
  const [before, after] = [by(files[0]), by(files[files.length - 1])];
  const keys = [...before.keys()].reverse().filter((key) => after.has(key));
  if (!keys.length) return null;
  const cell = (row) => el("td", {}, el("div", { class: "said" }, (row.completion || []).map((message) => message.content).join("\n") || "(nothing)"),
    row.reward !== undefined && el("span", { class: "small" }, `reward ${show(row.reward)}`));
  const line = (key) => el("tr", {}, el("th", { scope: "row" }, (before.get(key).prompt || []).slice(-1).map((message) => message.content)), cell(before.get(key)), cell(after.get(key)));
  const rows = keys.map(line);
  return el("details", { class: "answers-then", open: !isNarrow() }, el("summary", {}, "Answers to held-out prompts, before and after"),
    el("table", { class: "then-now" }, el("thead", {}, el("tr", {}, ["Prompt", `Step ${files[0].step}`, `Step ${files[files.length - 1].step}`].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.slice(0, 4))), moreRows(rows.slice(4)));
}

function moreRows(rows) {
  if (!rows.length) return null;
  const button = el("button", { class: "more", type: "button", onclick: () => {
    button.previousElementSibling.tBodies[0].append(...rows);
    button.remove();
  } }, `Show ${plural(rows.length, "more answer", "more answers")}`);
  return button;
}

function renderConfig(data, runs) {
  const several = data.kind === "comparison";
  byId("config").hidden = !runs.some((run) => run.facts.length || run.step);
  fill(byId("config"), el("h2", { id: "config-title" }, "Config and data"),
    several && differences(runs),
    runs.map((run) => el("div", { class: "config-of" }, several && el("h3", {}, run.name),
      run.facts.length ? el("dl", { class: "facts" }, run.facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))
        : el("p", { class: "empty" }, "This folder holds no config.yaml."),
      run.config && el("details", { class: "yaml" }, el("summary", {}, "The whole config, with every default"), copyButton(run.config), el("pre", {}, run.config)))));
}

function copyButton(text) {
  const button = el("button", { class: "quiet copy", type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select the text to copy it";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } }, "Copy");
  return button;
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].filter((key) => new Set(runs.map((run) => run.settings[key])).size > 1);
  if (!keys.length) return el("p", {}, "Both were trained with the same config.");
  return el("div", { class: "scroll" }, el("table", { class: "compare" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Set otherwise"), runs.map((run) => el("th", { scope: "col" }, run.name)))),
    el("tbody", {}, keys.map((key) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, key)), runs.map((run) => el("td", {}, run.settings[key] ?? "\u2013")))))));
}

function renderFoot(data, runs) {
  const notes = [...new Set(runs.flatMap((run) => run.notes))];
  fill(byId("foot"), notes.map((note) => el("p", {}, note)),
    el("p", {}, `Upweight ${data.version}. ${data.live ? "Read" : "Made"} ${when(data.made)} from ${[...new Set(data.runs.map((run) => run.folder))].join(", ")}. Nothing on this page is loaded from elsewhere. Curves: uPlot (MIT).`));
}
