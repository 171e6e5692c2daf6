// Server-sent events out of a byte stream, as the HTML standard cuts them. EventSource can't send a body or a key.

const LINE_END = /\r\n|\r|\n/;

/** Takes text in pieces of any size and gives the events that have become complete. */
export class EventParser {
  #rest = "";
  #data = [];
  #name = "";
  #afterReturn = false;

  feed(text) {
    if (text === "") {
      return [];
    }
    if (this.#afterReturn && text[0] === "\n") {
      text = text.slice(1); // the second half of a \r\n
    }
    this.#afterReturn = text.endsWith("\r");
    const lines = (this.#rest + text).split(LINE_END);
    this.#rest = lines.pop();
    return lines.map((line) => this.#take(line)).filter((event) => event !== null);
  }

  #take(line) {
    if (line === "") {
      const event = this.#data.length ? { name: this.#name || "message", data: this.#data.join("\n") } : null;
      this.#data = [];
      this.#name = "";
      return event;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "data") {
      this.#data.push(value);
    } else if (field === "event") {
      this.#name = value;
    }
    return null;
  }
}

/** The events of a response body. Leaving the loop early cancels the response. */
export async function* serverSentEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder(); // keeps the first bytes of a character until the others come
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    await reader.cancel().catch(() => {}); // an aborted stream can't be cancelled again, and need not be
  }
}
