// An answer as it grows: what chunks say, gathered into one message.

/** A message of the assistant that nothing has been said of yet. */
export function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", toolCalls: [], finish: null, usage: null, error: null, stopped: false };
}

/** Add what a chunk tells. Returns whether it brought something to show. */
export function addChunk(answer, chunk) {
  if (chunk.usage) {
    answer.usage = chunk.usage;
  }
  const choice = chunk.choices?.[0];
  if (!choice) {
    return false;
  }
  const delta = choice.delta ?? {};
  // Two names are about for one thing, and some servers send both.
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  answer.reasoning += reasoning;
  // The lines that a model leaves empty behind its reasoning are not the answer's.
  answer.content = (answer.content + (delta.content ?? "")).replace(/^\n+/, "");
  for (const part of delta.tool_calls ?? []) {
    addToolCall(answer.toolCalls, part);
  }
  answer.finish = choice.finish_reason ?? answer.finish;
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

/** The first piece of a call brings its id and name, the later ones more of its arguments. */
function addToolCall(calls, part) {
  const index = part.index ?? calls.length;
  let known = calls.find((entry) => entry.index === index);
  if (!known) {
    known = { index, id: "", name: "", arguments: "" };
    calls.push(known);
  }
  known.id = part.id ?? known.id;
  known.name += part.function?.name ?? "";
  known.arguments += part.function?.arguments ?? "";
}

/** A message as the API takes it back. */
export function asRequestMessage(message) {
  if (message.role === "user") {
    const image = message.image && { type: "image_url", image_url: { url: message.image } };
    return { role: "user", content: image ? [image, { type: "text", text: message.content }] : message.content };
  }
  const sent = { role: message.role, content: message.content };
  if (message.toolCalls?.length) {
    sent.content ||= null; // a call alone has no content
    sent.tool_calls = message.toolCalls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return sent;
}
