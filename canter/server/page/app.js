// The page: a conversation, the form that goes on with it, and what stands around them.

import { addChunk, asRequestMessage, newAnswer } from "./answer.js";
import { chatChunks, listModels } from "./api.js";
import { announce, byId, make } from "./dom.js";
import { MessageView } from "./message.js";
import { LiveFigures } from "./metrics.js";
import { Settings } from "./settings.js";

const MODEL_RETRY_MS = 3000;
const MAX_IMAGE_BYTES = 16 << 20;
const STICKY_PIXELS = 60;
const MIN_SPEED_MS = 50; // what came in less says how the network packs, not how fast the model is

class Page {
  #messages = [];
  #views = new Map();
  #models = [];
  #image = null;
  #abort = null;
  #settings = new Settings(() => this.#loadModels());
  #log = byId("log");
  #prompt = byId("prompt");

  constructor() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && !event.defaultPrevented && this.#abort?.abort());
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("new-chat").addEventListener("click", () => this.#clear());
    byId("model").addEventListener("change", () => this.#offerImages());
    byId("image-file").addEventListener("change", () => this.#takeImage());
    byId("remove-image").addEventListener("click", () => this.#setImage(null, ""));
    this.#loadModels();
    new LiveFigures().start();
    this.#prompt.focus();
  }

  async #loadModels() {
    const select = byId("model");
    try {
      this.#models = await listModels();
      const chosen = select.value;
      select.replaceChildren(...this.#models.map(({ id }) => make("option", { value: id }, id)));
      select.disabled = false;
      if (this.#models.some(({ id }) => id === chosen)) {
        select.value = chosen;
      }
      this.#notice("");
      this.#offerImages();
    } catch (error) {
      select.disabled = true;
      this.#notice(error.message);
      if (error.status === 401) {
        this.#settings.open(true, "key");
      } else {
        setTimeout(() => this.#loadModels(), MODEL_RETRY_MS);
      }
    }
  }

  /** Images can be added only where the model's card says that it takes them. */
  #offerImages() {
    const card = this.#models.find(({ id }) => id === byId("model").value);
    const takesImages = Boolean(card?.input_modalities?.includes("image"));
    byId("images").hidden = !takesImages;
    if (!takesImages) {
      this.#setImage(null, "");
    }
  }

  #takeImage() {
    const file = byId("image-file").files[0];
    if (!file) {
      return;
    }
    if (file.size > MAX_IMAGE_BYTES) {
      this.#notice(`The image has ${file.size} bytes; at most ${MAX_IMAGE_BYTES} can be sent.`);
      this.#setImage(null, "");
      return;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => this.#setImage(reader.result, file.name));
    reader.addEventListener("error", () => this.#notice("The browser can't read this image."));
    reader.readAsDataURL(file);
  }

  #setImage(url, name) {
    this.#image = url;
    byId("image-name").textContent = name;
    byId("remove-image").hidden = !url;
    if (!url) {
      byId("image-file").value = "";
    }
  }

  #send() {
    const text = this.#prompt.value;
    if (this.#abort || text.trim() === "") {
      return;
    }
    const invalid = this.#settings.invalidField;
    if (invalid) {
      this.#settings.open(true, invalid.name);
      invalid.reportValidity();
      return;
    }
    this.#add({ role: "user", content: text, image: this.#image });
    this.#setImage(null, "");
    this.#prompt.value = "";
    this.#answer();
  }

  #add(message) {
    const view = new MessageView(message, {
      regenerate: (which) => this.#regenerate(which),
      edit: (which, content) => this.#edit(which, content),
    });
    this.#messages.push(message);
    this.#views.set(message, view);
    byId("empty").hidden = true;
    view.update(false);
    this.#log.append(view.element);
    this.#log.scrollTop = this.#log.scrollHeight;
    return view;
  }

  /** Drop the messages from this place on. */
  #cut(start) {
    for (const message of this.#messages.splice(start)) {
      this.#views.get(message).element.remove();
      this.#views.delete(message);
    }
    byId("empty").hidden = this.#messages.length > 0;
  }

  #clear() {
    this.#abort?.abort();
    this.#cut(0);
    this.#prompt.focus();
  }

  #regenerate(message) {
    if (this.#abort) {
      return;
    }
    this.#cut(this.#messages.indexOf(message));
    this.#answer();
  }

  #edit(message, content) {
    message.content = content;
    this.#views.get(message).update(message === this.#messages.at(-1) && this.#abort !== null);
    if (message.role === "user" && !this.#abort) {
      this.#cut(this.#messages.indexOf(message) + 1);
      this.#answer();
    }
  }

  #requestBody() {
    const system = this.#settings.system;
    return {
      model: byId("model").value || undefined,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.#messages.map(asRequestMessage)],
      stream: true,
      stream_options: { include_usage: true },
      tools: this.#settings.tools,
      ...this.#settings.sampling,
    };
  }

  async #answer() {
    const body = this.#requestBody();
    const answer = newAnswer();
    const view = this.#add(answer);
    const times = { start: performance.now(), first: 0, last: 0 };
    this.#setBusy(new AbortController());
    const { signal } = this.#abort;
    view.update(true);
    let frame = 0;
    const draw = () => {
      frame = 0;
      this.#whileSticky(() => view.update(true));
    };
    try {
      for await (const chunk of chatChunks(body, signal)) {
        if (addChunk(answer, chunk)) {
          times.last = performance.now();
          times.first ||= times.last;
          frame ||= requestAnimationFrame(draw);
        }
      }
      announce("The answer is complete.");
    } catch (error) {
      answer.stopped = signal.aborted;
      answer.error = signal.aborted ? null : error.message;
      announce(answer.error ?? "Stopped.");
      if (error.status === 401) {
        this.#settings.open(true, "key");
      }
    }
    cancelAnimationFrame(frame);
    answer.figures = figures(answer, times);
    this.#whileSticky(() => view.update(false));
    this.#setBusy(null);
  }

  /** Change what is shown; who reads the end goes on to see it. */
  #whileSticky(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    change();
    if (scrollHeight - scrollTop - clientHeight < STICKY_PIXELS) {
      this.#log.scrollTop = this.#log.scrollHeight;
    }
  }

  #setBusy(abort) {
    const hadFocus = document.activeElement === byId("stop");
    this.#abort = abort;
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
    document.body.classList.toggle("busy", abort !== null);
    if (hadFocus) {
      this.#prompt.focus();
    }
  }

  #notice(text) {
    const notice = byId("notice");
    notice.textContent = text;
    notice.hidden = text === "";
  }
}

/** How many tokens, how fast, and how long the first one took. */
function figures({ usage }, { start, first, last }) {
  const parts = [];
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens) {
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  }
  if (tokens > 1 && last - first > MIN_SPEED_MS) {
    parts.push(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  }
  if (first) {
    parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
  }
  return parts.join(" · ");
}

new Page();
