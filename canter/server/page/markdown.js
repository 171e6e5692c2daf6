// The part of Markdown that models write most, as elements made of text nodes. What isn't known stays as it was written.

import { copyButton, make } from "./dom.js";

const SAFE_SCHEMES = ["http:", "https:", "mailto:"];
const MAX_DEPTH = 6;
const FENCE = /^(\s{0,16})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/; // also where it is part of a list
const HEADING = /^ {0,3}(#{1,6})\s+(.+?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?/;
// Every repetition has a bound, so that no text makes the search slow.
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: escaped
    /(`{1,3})([^`]{1,2000}?)\2(?!`)/, // 2, 3: code
    /\*\*(?=\S)([^\n]{1,1000}?\S)\*\*(?!\*)|\*\*(\S)\*\*/, // 4, 5: strong
    /\*(?=[^\s*])([^*\n]{1,1000}?)\*/, // 6: emphasis
    /(?<![\p{L}\p{N}_])_(?=[^\s_])([^_\n]{1,1000}?)_(?![\p{L}\p{N}_])/, // 7: emphasis
    /\[([^\]\n]{1,300})\]\(\s*([^\s()]{1,2000}(?:\([^\s()]{0,200}\)[^\s()]{0,200})?)(?:\s+"[^"\n]{0,300}")?\s*\)/, // 8, 9: link
    /(https?:\/\/[^\s<>"'`)\]]{1,2000}[^\s<>"'`)\].,;:!?])/, // 10: bare link
  ]
    .map((part) => part.source)
    .join("|"),
  "gu",
);

/** Text of a message in an element, shown again and again while it grows: blocks that stay the same keep their elements. */
export class MarkdownView {
  #blocks = [];

  constructor() {
    this.element = make("div", { class: "markdown", dir: "auto" });
  }

  show(text) {
    const sources = splitBlocks(text);
    const same = this.#blocks.findIndex((block, i) => block !== sources[i]);
    const kept = same < 0 ? this.#blocks.length : same;
    while (this.element.childNodes.length > kept) {
      this.element.lastChild.remove();
    }
    for (const source of sources.slice(kept)) {
      this.element.append(renderBlock(source, 0));
    }
    this.#blocks = sources;
  }
}

/** The sources of top-level blocks. They depend on what stands before them only, so text that grows changes the last ones alone. */
export function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const close = () => {
    if (lines.length) {
      blocks.push(lines.join("\n"));
    }
    lines = [];
  };
  for (const line of text.split(/\r\n|\r|\n/)) {
    if (fence) {
      lines.push(line);
      if (closes(line, fence)) {
        fence = null;
        close();
      }
      continue;
    }
    const opening = FENCE.exec(line);
    if (opening) {
      close();
      fence = opening[2];
      lines.push(line);
    } else if (line.trim() === "") {
      close();
    } else if (startsAnew(line, lines)) {
      close();
      lines.push(line);
    } else {
      lines.push(line);
    }
  }
  close();
  return blocks;
}

const closes = (line, fence) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);

/** Whether a line can't belong to the block that is open. */
function startsAnew(line, lines) {
  if (!lines.length) {
    return false;
  }
  const first = lines[0];
  if (HEADING.test(first) || RULE.test(first) || HEADING.test(line) || RULE.test(line)) {
    return true;
  }
  return QUOTE.test(line) !== QUOTE.test(first) || (ITEM.test(line) && !ITEM.test(first));
}

function renderBlock(source, depth) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    return renderCode(lines, fence);
  }
  const heading = HEADING.exec(lines[0]);
  if (heading) {
    return withInline(make("h" + Math.min(6, heading[1].length + 2)), heading[2]);
  }
  if (RULE.test(lines[0])) {
    return make("hr");
  }
  if (depth < MAX_DEPTH && QUOTE.test(lines[0])) {
    const inner = lines.map((line) => line.replace(QUOTE, "")).join("\n");
    return make("blockquote", {}, ...splitBlocks(inner).map((block) => renderBlock(block, depth + 1)));
  }
  if (depth < MAX_DEPTH && ITEM.test(lines[0])) {
    return renderList(lines, depth);
  }
  const paragraph = make("p");
  lines.forEach((line, i) => {
    withInline(paragraph, i ? line.trimStart() : line);
    if (i < lines.length - 1) {
      paragraph.append(make("br"));
    }
  });
  return paragraph;
}

function renderCode(lines, [, indent, fence, language]) {
  const isClosed = lines.length > 1 && closes(lines.at(-1), fence);
  const inner = lines.slice(1, isClosed ? -1 : undefined);
  const code = inner.map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line)).join("\n");
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), copyButton(() => code, "Copy code"));
  return make("div", { class: "code" }, head, make("pre", { tabIndex: 0 }, make("code", {}, code)));
}

/** Lines with more indentation than the first item's belong to the item above them. */
function renderList(lines, depth) {
  const [, indent, bullet, number] = ITEM.exec(lines[0]);
  const list = make(bullet ? "ul" : "ol", number ? { start: Number(number) } : {});
  let item = null;
  let nested = [];
  const close = () => {
    if (nested.length) {
      item.append(...splitBlocks(nested.join("\n")).map((block) => renderBlock(block, depth + 1)));
    }
    nested = [];
  };
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && (item === null || match[1].length <= indent.length)) {
      close();
      item = withInline(make("li"), match[4]);
      list.append(item);
    } else if (match || nested.length) {
      nested.push(line);
    } else {
      item.append(make("br"));
      withInline(item, line.trim());
    }
  }
  close();
  return list;
}

/** Append text with its inline marks. */
function withInline(element, text, depth = 0) {
  let end = 0;
  for (const match of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    if (match.index > end) {
      element.append(text.slice(end, match.index));
    }
    element.append(inlineNode(match, depth));
    end = match.index + match[0].length;
  }
  element.append(text.slice(end));
  return element;
}

function inlineNode([whole, escaped, , code, strong, letter, star, underscore, label, target, bare], depth) {
  if (escaped) {
    return escaped;
  }
  if (code !== undefined) {
    return make("code", {}, code);
  }
  if (strong ?? letter) {
    return withInline(make("strong"), strong ?? letter, depth + 1);
  }
  if (star ?? underscore) {
    return withInline(make("em"), star ?? underscore, depth + 1);
  }
  const href = safeUrl(target ?? bare);
  if (href === null) {
    return whole;
  }
  const link = make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" });
  return label ? withInline(link, label, MAX_DEPTH) : withInline(link, bare, MAX_DEPTH);
}

/** The address if it is whole and of a harmless scheme, else null: a relative one would lead into this server. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return SAFE_SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
