"use strict";
// Puts the page together, keeps it up to date, and remembers the theme.

const state = { data: null, runs: [], stage: 0, seen: {} };
const EVERY = 2000; // milliseconds between two questions to the server

function runsShown(data) {
  if (data.kind !== "stages") return data.runs;
  state.stage = Math.min(state.stage, data.runs.length - 1);
  return [data.runs[state.stage]];
}

// A section is drawn again only when what it shows has changed: whoever reads or types there is left in peace.
function whenChanged(name, values, draw) {
  const now = JSON.stringify(values);
  if (state.seen[name] === now) return;
  state.seen[name] = now;
  draw();
}

function render(data) {
  state.data = data;
  const runs = state.runs = runsShown(data);
  const first = !Object.keys(state.seen).length;
  renderHead(data, runs);
  whenChanged("curves", [state.stage, runs.map((run) => [run.steps, run.metrics, run.evaluated, run.health, run.state])],
    () => (first || state.redraw ? renderCurves(data, runs) : updateCurves(data, runs)));
  state.redraw = false;
  whenChanged("health", [state.stage, runs.map((run) => [run.health, run.warnings, run.name, run.state, run.steps.length > 0, run.too_early])], () => renderHealth(data, runs));
  whenChanged("held-out", [state.stage, runs.map((run) => [run.held_out, run.name])], () => renderHeldOut(runs));
  whenChanged("completions", [state.stage, runs.map((run) => run.completions.map((part) => [part.set, part.step, part.total])), runs.map((run) => run.state)],
    () => (first || !byId("written") ? renderCompletions(runs) : keepingFocus(() => renderCompletions(runs))));
  whenChanged("config", [state.stage, runs.map((run) => [run.facts, run.config, run.name])], () => renderConfig(data, runs));
  renderSections();
  renderFoot(data, runs);
}

function keepingFocus(draw) {
  const focused = document.activeElement;
  const id = focused && byId("completions").contains(focused) ? focused.id : "";
  const caret = id === "filter" ? [focused.selectionStart, focused.selectionEnd] : null;
  draw();
  if (id && byId(id)) {
    byId(id).focus({ preventScroll: true });
    if (caret) byId(id).setSelectionRange(...caret);
  }
}

function chooseStage(number) {
  state.stage = number;
  state.redraw = true;
  curves.zoom = null;
  reading.set = null;
  render(state.data);
  document.querySelectorAll(".stage")[number].focus();
}

// Theme: as the system has it until someone chooses.

function themeNow() {
  return document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function remembered(value) {
  try {
    if (value) localStorage.setItem("upweight-theme", value);
    return localStorage.getItem("upweight-theme");
  } catch {
    return null; // files opened from disk may have no storage
  }
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").textContent = themeNow() === "dark" ? "Light theme" : "Dark theme";
}

function recolour() {
  setTheme(null);
  curves.drawn.forEach(drawChart);
  renderWritten();
  if (state.data) renderHead(state.data, state.runs);
}

// Live: asks the server that gave this page what is new.

async function follow(mark) {
  const label = byId("live");
  label.hidden = false;
  try {
    const answer = await fetch(`data.json?since=${encodeURIComponent(mark)}`, { cache: "no-store" });
    if (answer.status === 200) {
      const data = await answer.json();
      mark = data.mark;
      render(data);
    }
    const going = state.data.runs.some((run) => ["running", "missing", "empty"].includes(run.state));
    label.className = going ? "live on" : "live";
    label.textContent = going ? "Live" : "Ended";
  } catch {
    label.className = "live lost";
    label.textContent = "No connection, trying again";
  }
  setTimeout(() => follow(mark), EVERY);
}

setTheme(remembered());
byId("theme").addEventListener("click", () => {
  const theme = themeNow() === "dark" ? "light" : "dark";
  remembered(theme);
  setTheme(theme);
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

const first = JSON.parse(byId("data").textContent);
render(first);
if (first.live) follow(first.mark);
