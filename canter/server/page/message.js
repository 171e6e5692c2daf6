// One message on the page: what it says, and what can be done with it.

import { copyButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model" };
const FINISHES = {
  length: "The answer was cut off: the most tokens were reached.",
  abort: "The server broke the answer off.",
  repetition: "The server broke the answer off: it repeated itself.",
  content_filter: "A filter broke the answer off.",
};

/** `actions` has `regenerate(message)` and `edit(message, text)`. */
export class MessageView {
  #message;
  #actions;
  #text = new MarkdownView();
  #reasoning = null;
  #calls = [];
  #extras = make("div");
  #body = make("div", { class: "body" });
  #foot = make("div", { class: "foot" });

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    const name = NAMES[message.role];
    this.element = make("article", { class: `message ${message.role}`, "aria-label": name }, make("h2", {}, name), this.#body);
    this.#restoreBody();
  }

  /** Show the message as it is now. While it is `live`, nothing can be done with it. */
  update(live) {
    const message = this.#message;
    this.#showReasoning(message.reasoning ?? "", live);
    this.#text.show(message.content);
    (message.toolCalls ?? []).forEach((call, i) => this.#showCall(call, i));
    this.element.setAttribute("aria-busy", String(live));
    this.#foot.replaceChildren(...(live ? [make("span", { class: "waiting" }, this.#waiting())] : this.#footNodes()));
  }

  #restoreBody() {
    const { image } = this.#message;
    const picture = image ? make("img", { src: image, alt: "Image of this message", class: "picture" }) : null;
    this.#body.replaceChildren(...[this.#reasoning?.element, picture, this.#text.element, this.#extras, this.#foot].filter(Boolean));
  }

  #waiting() {
    const { content, reasoning } = this.#message;
    return content ? "Writing…" : reasoning ? "Thinking…" : "Waiting for the first token…";
  }

  #showReasoning(text, live) {
    if (!text) {
      return;
    }
    if (!this.#reasoning) {
      const view = new MarkdownView();
      const title = make("summary");
      this.#reasoning = { view, title, element: make("details", { class: "reasoning" }, title, view.element) };
      this.#restoreBody();
    }
    this.#reasoning.title.textContent = live && !this.#message.content ? "Reasoning, under way" : "Reasoning";
    this.#reasoning.view.show(text);
  }

  #showCall(call, i) {
    if (!this.#calls[i]) {
      const title = make("summary");
      const text = make("code");
      const element = make("details", { class: "tool" }, title, make("pre", { tabIndex: 0 }, text));
      this.#calls[i] = { title, text };
      this.#extras.append(element);
    }
    this.#calls[i].title.textContent = `Tool call: ${call.name || "…"}`;
    this.#calls[i].text.textContent = indented(call.arguments);
  }

  #footNodes() {
    const message = this.#message;
    const nodes = [];
    if (message.error) {
      nodes.push(make("p", { class: "error" }, message.error));
    }
    const note = message.stopped ? "You stopped this answer." : FINISHES[message.finish];
    if (note && !message.error) {
      nodes.push(make("p", { class: "note" }, note));
    }
    const buttons = [copyButton(() => message.content, "Copy message"), this.#button("Edit", () => this.#edit())];
    if (message.role === "assistant") {
      buttons.push(this.#button("Regenerate", () => this.#actions.regenerate(message)));
    }
    const figures = make("span", { class: "figures" }, message.figures ?? "");
    return [...nodes, make("div", { class: "row" }, ...buttons, figures)];
  }

  #button(label, action) {
    const button = make("button", { type: "button", class: "small" }, label);
    button.addEventListener("click", action);
    return button;
  }

  #edit() {
    const isUser = this.#message.role === "user";
    const area = make("textarea", { value: this.#message.content, rows: 5, "aria-label": "Text of the message" });
    const leave = () => {
      this.#restoreBody();
      this.#foot.querySelector("button:nth-of-type(2)")?.focus();
    };
    const save = () => {
      leave();
      this.#actions.edit(this.#message, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        save();
      }
    });
    const row = make("div", { class: "row" }, this.#button(isUser ? "Save and send" : "Save", save), this.#button("Cancel", leave));
    this.#body.replaceChildren(area, row);
    area.focus();
  }
}

/** JSON with indentation; what is not JSON, or not yet, as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
