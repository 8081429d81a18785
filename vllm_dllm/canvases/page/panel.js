// One answer: its canvases while they come, its steps to go through again, its text.

const WORST_NATS = 3; // entropy from which a position is drawn as unsure as can be

// The root: small entropies are where positions differ.
const doubt = (nats) => Math.sqrt(Math.min(nats / WORST_NATS, 1)).toFixed(3);

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Keys and values from “Others, as JSON”.
function readObject(text) {
  let read = null;
  try {
    read = JSON.parse(text);
  } catch {
    // Said below.
  }
  if (read === null || typeof read !== "object" || Array.isArray(read)) {
    throw new Error(`“Others, as JSON” must be an object such as {"diffusion_accept_tokens": 8}, got ${text}`);
  }
  return read;
}

export class Panel {
  #root;
  #canvas;
  #slider;
  #play;
  #steps = []; // canvases, in the order they came
  #rate = null; // tokens a second
  #isReplaying = false;

  constructor(parent, title) {
    this.#root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.#canvas = this.#find(".canvas");
    this.#slider = this.#find("input[type=range]");
    this.#play = this.#find(".play");
    this.title = title;
    parent.append(this.#root);
    this.#slider.addEventListener("input", () => {
      this.#isReplaying = false;
      this.#draw(Number(this.#slider.value));
    });
    this.#play.addEventListener("click", () => this.#replay());
  }

  set title(text) {
    this.#find("h2").textContent = text;
    this.#root.setAttribute("aria-label", text);
  }

  // The rules of acceptance that the model knows.
  offer(rules) {
    const select = this.#find("[data-key=diffusion_acceptance]");
    for (const rule of rules) select.add(new Option(rule));
  }

  remove() {
    this.#isReplaying = false;
    this.#root.remove();
  }

  complain(text) {
    this.#find(".problem").textContent = text;
  }

  // `ask(settings)` gives the chunks. Draws each canvas for at least `pace` ms; resolves to why
  // there was no answer, or to an empty text.
  async show(ask, pace) {
    this.#reset();
    const start = performance.now();
    const waiting = [];
    let text = "";
    let end = null;
    let problem = "";
    let isOpen = true;
    const drawing = (async () => {
      // Canvases come as fast as the server denoises; a person wants to see them.
      while (isOpen || waiting.length > 0) {
        if (waiting.length === 0) {
          await sleep(10);
          continue;
        }
        this.#add(waiting.shift());
        await sleep(pace);
      }
    })();
    try {
      for await (const chunk of ask(this.#settings())) {
        if (chunk.canvas) waiting.push(chunk.canvas);
        text += chunk.choices[0]?.delta?.content ?? "";
        end = chunk.choices[0]?.finish_reason ?? end;
        if (chunk.usage) {
          this.#rate = chunk.usage.completion_tokens / ((performance.now() - start) / 1000);
        }
      }
    } catch (error) {
      waiting.length = 0;
      problem = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      isOpen = false;
    }
    await drawing;
    this.#find(".answer").textContent = text;
    this.#numbers();
    this.#play.disabled = this.#steps.length < 2;
    if (problem === "" && text === "") {
      problem =
        end === "length"
          ? "All of its tokens were without text. Raise “Most tokens”."
          : "The model ended its answer before the first word.";
    }
    this.complain(problem);
    return problem;
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  #settings() {
    const settings = {};
    for (const field of this.#root.querySelectorAll("[data-key]")) {
      const value = field.value.trim();
      if (value === "") continue;
      if (field.dataset.key === "") Object.assign(settings, readObject(value));
      else settings[field.dataset.key] = field.type === "number" ? Number(value) : value;
    }
    return settings;
  }

  #reset() {
    this.#steps = [];
    this.#rate = null;
    this.#isReplaying = false;
    this.#slider.disabled = this.#play.disabled = true;
    this.#slider.max = this.#slider.value = 0;
    this.#find(".position").textContent = "Steps";
    this.#canvas.replaceChildren();
    for (const selector of [".answer", ".problem", ".settled"]) this.#find(selector).textContent = "";
    for (const shown of this.#root.querySelectorAll("[data-show]")) shown.textContent = "–";
  }

  #add(canvas) {
    const last = this.#steps.length - 1;
    const follows = Number(this.#slider.value) === Math.max(last, 0);
    this.#steps.push(canvas);
    this.#slider.max = last + 1;
    this.#slider.disabled = false;
    // Else a person looks at an earlier one.
    if (follows) this.#draw(last + 1);
  }

  async #replay() {
    this.#isReplaying = true;
    const pace = Math.max(Number(document.getElementById("pace").value), 60);
    for (let i = 0; i < this.#steps.length && this.#isReplaying; i++) {
      this.#draw(i);
      await sleep(pace);
    }
    this.#isReplaying = false;
  }

  #draw(index) {
    const canvas = this.#steps[index];
    this.#slider.value = index;
    const blocks = new Set(this.#steps.map((one) => one.block)).size;
    this.#find(".position").textContent =
      `Step ${index + 1} of ${this.#steps.length}` + (blocks > 1 ? ` on ${blocks} canvases` : "");
    this.#slider.setAttribute(
      "aria-valuetext",
      `Canvas ${canvas.block + 1}, step ${canvas.step}: ${canvas.texts.join("")}`,
    );
    this.#settle(index);
    this.#canvas.classList.toggle("settling", canvas.finished);
    const accepted = canvas.accepted.filter(Boolean).length;
    this.#canvas.setAttribute(
      "aria-label",
      `Canvas of ${canvas.tokens.length} positions, ${accepted} accepted`,
    );
    const old = this.#canvas.children;
    while (old.length > canvas.tokens.length) old[old.length - 1].remove();
    canvas.texts.forEach((text, i) => this.#drawToken(old[i], canvas, text, i));
    this.#numbers(canvas);
  }

  #drawToken(element, canvas, text, i) {
    const token = element ?? this.#canvas.appendChild(document.createElement("span"));
    token.textContent = text === "" ? "·" : text.replaceAll("\n", "⏎");
    token.className = "token";
    token.classList.toggle("accepted", canvas.accepted[i] === 1);
    token.classList.toggle("special", text === "");
    token.style.setProperty("--doubt", doubt(canvas.entropy[i]));
    token.title = `token ${canvas.tokens[i]}, entropy ${canvas.entropy[i]} nats`;
  }

  // The blocks that were finished before the step.
  #settle(index) {
    const current = this.#steps[index].block;
    const blocks = this.#steps.slice(0, index).filter((one) => one.finished && one.block < current);
    this.#find(".settled").replaceChildren(
      ...blocks.map((one) => {
        const block = document.createElement("span");
        block.className = "block";
        block.textContent = one.texts.join("");
        return block;
      }),
    );
  }

  #numbers(canvas) {
    const show = (name, text) => {
      this.#find(`[data-show=${name}]`).textContent = text;
    };
    if (canvas) {
      show("block", canvas.block + 1);
      show("step", canvas.step);
      show("temperature", canvas.temperature.toFixed(2));
      show("entropy", canvas.mean_entropy.toFixed(2));
    }
    if (this.#rate !== null) show("rate", this.#rate.toFixed(0));
  }
}
