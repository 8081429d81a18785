// Asks the server that this page comes from, and draws the canvases of its streams.
// What a model says is inserted as text, never as HTML.

import { Panel } from "./panel.js";
import { readAbout, readModel, streamChat } from "./stream.js";

const byId = (id) => document.getElementById(id);
const about = await readAbout();
const panels = [];
let running = null; // AbortController of the streams that are open

function key() {
  return byId("key").value.trim();
}

async function showModel() {
  try {
    const model = await readModel(key());
    const note = about.acceptance.length === 0 ? ": no diffusion model, so there are no canvases to watch" : "";
    byId("model").textContent = model + note;
    return model;
  } catch (error) {
    byId("model").textContent = error.message;
    throw error;
  }
}

function showPanels() {
  const wanted = byId("both").checked ? 2 : 1;
  while (panels.length > wanted) panels.pop().remove();
  while (panels.length < wanted) {
    const panel = new Panel(byId("panels"), "Settings B");
    panel.offer(about.acceptance);
    panels.push(panel);
  }
  panels[0].title = wanted === 2 ? "Settings A" : "Canvas";
}

function setRunning(controller) {
  running = controller;
  byId("start").disabled = controller !== null;
  byId("both").disabled = controller !== null;
  byId("stop").disabled = controller === null;
}

async function ask() {
  const controller = new AbortController();
  setRunning(controller);
  byId("status").textContent = "Asking…";
  try {
    const model = await showModel();
    const seed = byId("seed").value;
    const body = {
      model,
      messages: [{ role: "user", content: byId("prompt").value }],
      max_tokens: Number(byId("tokens").value),
      ...(seed === "" ? {} : { seed: Number(seed) }),
    };
    const pace = Number(byId("pace").value);
    const answers = panels.map((panel) =>
      panel.show((settings) => streamChat(body, settings, key(), controller.signal), pace),
    );
    const problems = new Set((await Promise.all(answers)).filter(Boolean));
    byId("status").textContent = problems.size === 0 ? "Done." : `Not answered: ${[...problems].join(" ")}`;
  } catch (error) {
    byId("status").textContent = "";
    panels[0].complain(error.message);
  } finally {
    setRunning(null);
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) ask();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("both").addEventListener("change", showPanels);
byId("key").addEventListener("change", () => showModel().catch(() => {}));
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});

function showExamples() {
  for (const question of about.examples) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = question;
    button.addEventListener("click", () => {
      byId("prompt").value = question;
      byId("ask").requestSubmit();
    });
    byId("examples").append(button);
  }
  byId("prompt").value = about.examples[0] ?? "";
}

showExamples();
showPanels();
showModel().catch(() => {});
