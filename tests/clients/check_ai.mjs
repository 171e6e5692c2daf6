// The npm package `ai` with its openai-compatible provider.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

// The packages lie in a folder of their own, not beside this file.
const require = createRequire(join(process.env.CANTER_NODE, "package.json"));
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, jsonSchema, APICallError } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const { CANTER_URL: url, CANTER_KEY: key, CANTER_MODEL: name } = process.env;
const CAPITAL = "What is the capital of France? Answer in one sentence.";
const COUNT = "Count from one to ten in words.";
const provider = (apiKey) => createOpenAICompatible({ name: "canter", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const model = provider(key)(name);
const options = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };

const checks = {
  async generates_text() {
    const answer = await generateText({ ...options, prompt: CAPITAL, system: "You are brief." });
    assert.match(answer.text, /Paris/);
    assert.equal(answer.finishReason, "stop");
    assert.ok(answer.usage.inputTokens > 10 && answer.usage.outputTokens > 5);
    assert.equal(answer.response.modelId, name);
  },
  async streams_text_in_order() {
    const whole = await generateText({ ...options, prompt: COUNT });
    const stream = streamText({ ...options, prompt: COUNT });
    const parts = [];
    for await (const part of stream.fullStream) parts.push(part);
    const kinds = parts.map((part) => part.type);
    assert.ok(!kinds.includes("error"), JSON.stringify(parts.find((part) => part.type === "error")));
    const order = ["start", "text-start", "text-delta", "text-end", "finish"].map((kind) => kinds.indexOf(kind));
    assert.deepEqual(order, [...order].sort((a, b) => a - b));
    assert.ok(order.every((index) => index >= 0), kinds.join());
    assert.ok(kinds.filter((kind) => kind === "text-delta").length > 5);
    assert.equal(await stream.text, whole.text);
    assert.equal(await stream.finishReason, whole.finishReason);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  },
  async remembers_a_conversation() {
    const messages = [
      { role: "user", content: "My name is Robert." },
      { role: "assistant", content: "Hello Robert!" },
      { role: "user", content: "What is my name?" },
    ];
    const all = await generateText({ ...options, messages });
    const last = await generateText({ ...options, messages: messages.slice(-1) });
    assert.ok(all.text.length > 0 && all.usage.inputTokens > last.usage.inputTokens);
  },
  async stops() {
    const short = await generateText({ ...options, prompt: COUNT, maxOutputTokens: 3 });
    assert.equal(short.finishReason, "length");
    assert.equal(short.usage.outputTokens, 3);
    const stopped = await generateText({ ...options, prompt: CAPITAL, stopSequences: ["Paris"] });
    assert.equal(stopped.finishReason, "stop");
    assert.doesNotMatch(stopped.text, /Paris/);
  },
  async completes_a_text() {
    const answer = await generateText({ ...options, model: provider(key).completionModel(name), prompt: "one, two, three," });
    assert.ok(answer.text.length > 0);
  },
  async calls_functions() {
    const city = { type: "string", maxLength: 20 };
    const inputSchema = jsonSchema({ type: "object", properties: { city }, required: ["city"], additionalProperties: false });
    const tools = { weather: { description: "the weather of a city", inputSchema } };
    const body = { ...options, prompt: "What is the weather in Paris?", maxOutputTokens: 120, tools };
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const answer = await generateText({ ...body, toolChoice });
      assert.equal(answer.toolCalls[0].toolName, "weather");
      assert.deepEqual(Object.keys(answer.toolCalls[0].input), ["city"]);
      const stream = streamText({ ...body, toolChoice });
      const parts = [];
      for await (const part of stream.fullStream) parts.push(part);
      assert.ok(parts.some((part) => part.type === "tool-input-delta"), parts.map((part) => part.type).join());
      assert.deepEqual((await stream.toolCalls)[0].input, answer.toolCalls[0].input);
    }
    const plain = await generateText({ ...body, prompt: CAPITAL });
    assert.match(plain.text, /Paris/);
  },
  async names_errors() {
    const failure = async (changes) => {
      try {
        await generateText({ ...options, prompt: "x", ...changes });
      } catch (error) {
        assert.ok(APICallError.isInstance(error), String(error));
        return error;
      }
      assert.fail("no error");
    };
    const unknown = await failure({ model: provider(key)("other") });
    assert.equal(unknown.statusCode, 404);
    assert.match(unknown.message, /other/);
    assert.equal((await failure({ topP: 5 })).statusCode, 400);
    assert.equal((await failure({ model: provider("wrong")(name) })).statusCode, 401);
  },
  async aborts_a_stream() {
    const abort = new AbortController();
    const stream = streamText({ ...options, prompt: COUNT, maxOutputTokens: 1000, abortSignal: abort.signal });
    for await (const part of stream.fullStream) {
      if (part.type === "text-delta") abort.abort();
    }
    assert.match((await generateText({ ...options, prompt: CAPITAL })).text, /Paris/);
  },
};

let folder = dirname(require.resolve("ai"));
while (!folder.endsWith("node_modules/ai")) folder = dirname(folder);
console.log(JSON.stringify({ version: JSON.parse(readFileSync(join(folder, "package.json"))).version }));
let failed = false;
for (const [check, body] of Object.entries(checks)) {
  let problem = null;
  try {
    await body();
  } catch (error) {
    failed = true;
    problem = error.stack ?? String(error);
  }
  console.log(JSON.stringify({ check, problem }));
}
process.exit(failed ? 1 : 0);
