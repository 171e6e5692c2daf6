// The settings form: kept for the life of the tab, and read for every request.

import { getKey, setKey } from "./api.js";
import { byId } from "./dom.js";

const KEPT = "canter.settings";
const NARROW = matchMedia("(max-width: 60rem)");

export class Settings {
  #form = byId("settings-form");
  #panel = byId("settings");
  #button = byId("toggle-settings");

  /** `onKey` is called when another key has been typed in. */
  constructor(onKey) {
    this.#restore();
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("input", () => this.#keep());
    this.#form.elements.key.addEventListener("change", onKey);
    this.#button.addEventListener("click", () => this.open(this.#panel.hidden));
    byId("close-settings").addEventListener("click", () => this.open(false));
    this.#panel.addEventListener("keydown", (event) => event.key === "Escape" && this.open(false));
    this.#setOpen(!NARROW.matches);
    NARROW.addEventListener("change", () => this.#setOpen(!NARROW.matches)); // there is no room beside the conversation
  }

  /** Open or close the panel and move the focus with it. */
  open(isOpen, field = null) {
    this.#setOpen(isOpen);
    (isOpen ? (field ? this.#form.elements[field] : byId("close-settings")) : this.#button).focus();
  }

  get system() {
    return this.#form.elements.system.value.trim();
  }

  /** The functions that the model may call, as the API takes them; undefined for none. */
  get tools() {
    const text = this.#form.elements.tools.value.trim();
    return text ? JSON.parse(text) : undefined;
  }

  /** The field that can't be sent as it stands, or null. */
  get invalidField() {
    this.#checkTools();
    return [...this.#numbers(), this.#form.elements.tools].find((input) => !input.checkValidity()) ?? null;
  }

  /** The sampling fields that have a value, under the API's names. */
  get sampling() {
    const given = this.#numbers().filter((input) => input.value !== "");
    return Object.fromEntries(given.map((input) => [input.name, Number(input.value)]));
  }

  #numbers() {
    return [...this.#form.querySelectorAll("input[type=number]")];
  }

  #checkTools() {
    let isList = true;
    try {
      isList = Array.isArray(this.tools ?? []);
    } catch {
      isList = false;
    }
    this.#form.elements.tools.setCustomValidity(isList ? "" : "Tools are a list in JSON, as the API takes them.");
  }

  #setOpen(isOpen) {
    this.#panel.hidden = !isOpen;
    this.#button.setAttribute("aria-expanded", String(isOpen));
  }

  #keep() {
    const { key, ...values } = Object.fromEntries(new FormData(this.#form));
    setKey(key);
    sessionStorage.setItem(KEPT, JSON.stringify(values));
    this.#checkTools();
    this.#applyTheme();
  }

  #restore() {
    const values = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    for (const [name, value] of Object.entries(values)) {
      if (this.#form.elements[name]) {
        this.#form.elements[name].value = value;
      }
    }
    this.#form.elements.key.value = getKey();
    this.#applyTheme();
  }

  #applyTheme() {
    document.documentElement.dataset.theme = this.#form.elements.theme.value;
  }
}
