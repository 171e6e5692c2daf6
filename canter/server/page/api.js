// Calls to the server that gave this page, with the key that was typed in, and its errors in its own words.

import { serverSentEvents } from "./sse.js";

const KEY = "canter.key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** Why a call failed; `status` is 0 where there was no answer. */
export class CallError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** A response with a good status; anything else is thrown as `CallError`, but for an abort, which stays what it is. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (getKey()) {
    headers.set("x-api-key", headerValue(getKey()));
  }
  let response;
  try {
    // document.baseURI: the server may be shown under a path.
    response = await fetch(new URL(path, document.baseURI), { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new CallError("The server can't be reached.");
  }
  if (!response.ok) {
    throw new CallError(messageOf(await response.text(), response), response.status);
  }
  return response;
}

/** Header values are bytes: characters beyond Latin-1 go as their UTF-8, which is what the server compares. */
function headerValue(key) {
  return String.fromCharCode(...new TextEncoder().encode(key.trim()));
}

function messageOf(text, response) {
  try {
    const { error } = JSON.parse(text);
    return String(error.message ?? error);
  } catch {
    return `The server answered ${response.status} ${response.statusText}.`;
  }
}

export async function listModels() {
  return (await (await call("v1/models")).json()).data;
}

/** The chunks of a streamed chat answer. Throws when the server says that it failed, or ends before [DONE]. */
export async function* chatChunks(body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  try {
    for await (const { data } of serverSentEvents(response.body)) {
      if (data === "[DONE]") {
        return;
      }
      const chunk = parseChunk(data);
      if (chunk.error) {
        throw new CallError(String(chunk.error.message ?? "The server failed."), Number(chunk.error.code) || 0);
      }
      yield chunk;
    }
  } catch (error) {
    throw error instanceof TypeError ? new CallError("The connection broke before the answer was complete.") : error;
  }
  throw new CallError("The connection ended before the answer was complete.");
}

function parseChunk(data) {
  try {
    return Object(JSON.parse(data));
  } catch {
    throw new CallError("The server sent an event that is not JSON.");
  }
}
