"use strict";
// Asks every served model the same questions, each with its own history. Text is added as text nodes only.
const byId = (id) => document.getElementById(id);
const columns = [];
let asking = false;

function element(parent, tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}

async function start() {
  const models = (await (await fetch("v1/models")).json()).data;
  byId("title").textContent = models.map((model) => model.id).join(" beside ");
  for (const [number, { id }] of models.entries()) {
    const section = element(byId("columns"), "section", "", "");
    element(section, "h2", "", id);
    element(section, "div", "note", number === 0 ? "trained" : "the model it was trained from");
    columns.push({ id, section, history: [] });
  }
}

function clear() {
  for (const column of columns) {
    column.history = [];
    column.section.querySelectorAll(".turn").forEach((turn) => turn.remove());
  }
}

async function answer(column, text) {
  element(column.section, "div", "turn user", text);
  const shown = element(column.section, "div", "turn", "");
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...column.history, { role: "user", content: text }];
  const body = { model: column.id, messages, stream: true, temperature: Number(byId("temperature").value), max_tokens: Number(byId("tokens").value) };
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.replace(/^data: /, "");
        if (data === "[DONE]") continue;
        shown.textContent += JSON.parse(data).choices[0]?.delta?.content ?? "";
        column.section.scrollTop = column.section.scrollHeight;
      }
    }
    column.history.push({ role: "user", content: text }, { role: "assistant", content: shown.textContent });
  } catch (error) {
    shown.classList.add("error");
    shown.textContent = String(error.message ?? error);
  }
}

async function ask(event) {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || asking) return;
  asking = byId("send").disabled = true;
  byId("text").value = "";
  for (const column of columns) await answer(column, text); // one after the other: the server has one model at a time
  asking = byId("send").disabled = false;
  byId("text").focus();
}

byId("ask").addEventListener("submit", ask);
byId("reset").addEventListener("click", clear);
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) byId("ask").requestSubmit();
  if (event.key === "Enter" && !event.shiftKey) event.preventDefault();
});
start().catch(() => { byId("title").textContent = "The server does not answer; start it again and reload this page."; });
