// Elements are made here and only from text: nothing that a model or a server says is ever read as HTML.

/** An element with properties (`class`, `data-…` and `aria-…` as attributes) and children; strings become text nodes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-")) {
      element.setAttribute(name, value);
    } else {
      element[name] = value;
    }
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Tell people who listen to the page. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Put text on the clipboard. Browsers offer it to safe origins only; elsewhere the old command has to do. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", { class: "hidden", value: text });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!done) {
    throw new Error("The browser does not let this page copy.");
  }
}

/** A button that copies what `text()` returns, and says whether it could. */
export function copyButton(text, label) {
  const button = make("button", { type: "button", class: "small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await copyText(text());
      button.textContent = "Copied";
      announce("Copied.");
    } catch (error) {
      button.textContent = "Not copied";
      announce(error.message);
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
