// The official OpenAI SDK for JavaScript, unmodified.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const baseURL = `${process.env.NPUHAL_BASE}/v1`;
const apiKey = process.env.NPUHAL_KEY;
const model = process.env.NPUHAL_MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const chat = client.chat.completions;
let checks = 0;
const check = (condition, what) => {
  assert.ok(condition, typeof what === "string" ? what : JSON.stringify(what));
  checks += 1;
};

async function rejects(kind, call, code, param = null) {
  let error;
  try {
    await call();
  } catch (thrown) {
    error = thrown;
  }
  check(error instanceof kind, `wanted ${kind.name}, found ${error}`);
  check(error.code === code && error.param === param, `${error.code} ${error.param}: ${error}`);
  check(error.requestID?.startsWith("req-"), `${error.requestID}`);
}

// Models.
const ids = [];
for await (const each of client.models.list()) ids.push(each.id);
check(ids.includes(model), ids);
check((await client.models.retrieve(model)).object === "model", "a model");

// A whole answer, and the same as a stream.
const settings = { model, messages, max_tokens: 24, temperature: 0 };
const whole = await chat.create(settings);
const text = whole.choices[0].message.content;
check(text.includes("Paris"), text);
check(whole.usage.total_tokens === whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage);
check(whole._request_id?.startsWith("req-"), `${whole._request_id}`);
const chunks = [];
for await (const chunk of await chat.create({ ...settings, stream: true, stream_options: { include_usage: true } })) {
  chunks.push(chunk);
}
check(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("") === text, "the stream says something else");
check(chunks.at(-1).usage.completion_tokens === whole.usage.completion_tokens, chunks.at(-1));
check(chunks.at(-2).choices[0].finish_reason === whole.choices[0].finish_reason, chunks.at(-2));
const runner = chat.stream(settings);
check((await runner.finalContent()) === text, "the runner says something else");

// Log probabilities.
const scored = await chat.create({ ...settings, max_tokens: 6, logprobs: true, top_logprobs: 3 });
const entries = scored.choices[0].logprobs.content;
check(entries.length === scored.usage.completion_tokens, entries);
check(Buffer.from(entries.flatMap((entry) => entry.bytes)).toString() === scored.choices[0].message.content, entries);
check(entries.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 3), entries);

// Several answers from a seed.
const drawn = [];
for (let round = 0; round < 2; round += 1) {
  const answer = await chat.create({ ...settings, max_tokens: 12, temperature: 1, seed: 7, n: 2 });
  drawn.push(answer.choices.map((choice) => choice.message.content));
}
assert.deepEqual(drawn[0], drawn[1]);
check(drawn[0][0] !== drawn[0][1], drawn);

// Texts.
const prompt = "The capital of France is";
const continued = await client.completions.create({ model, prompt, max_tokens: 8, temperature: 0, logprobs: 1 });
check(continued.choices[0].text.includes("Paris"), continued);
check(continued.choices[0].logprobs.tokens.join("") === continued.choices[0].text, continued);
let streamed = "";
for await (const chunk of await client.completions.create({ model, prompt, max_tokens: 8, temperature: 0, stream: true })) {
  streamed += chunk.choices[0].text;
}
check(streamed === continued.choices[0].text, streamed);

// Errors become the SDK's own.
const stranger = new OpenAI({ baseURL, apiKey: "not-the-key", maxRetries: 0 });
await rejects(OpenAI.AuthenticationError, () => stranger.models.retrieve(model), "invalid_api_key");
await rejects(OpenAI.NotFoundError, () => client.models.retrieve("none"), "model_not_found", "model");
await rejects(OpenAI.NotFoundError, () => chat.create({ ...settings, model: "none" }), "model_not_found", "model");
await rejects(OpenAI.BadRequestError, () => chat.create({ ...settings, temperature: 9 }), "invalid_value", "temperature");
await rejects(OpenAI.BadRequestError, () => chat.create({ ...settings, messages: [], stream: true }), "invalid_value", "messages");
const long = [{ role: "user", content: "a b ".repeat(8000) }];
await rejects(OpenAI.BadRequestError, () => chat.create({ ...settings, messages: long }), "context_length_exceeded", "messages");

// A stream that is given up; the next request is answered.
const endless = await chat.create({ ...settings, max_tokens: 4000, temperature: 1.5, stream: true });
for await (const _ of endless) {
  if (++checks % 4 === 0) break;
}
const several = await Promise.all([1, 2, 3, 4].map(() => chat.create(settings)));
check(several.every((answer) => answer.choices[0].message.content === text), "answers side by side differ");
console.log(`openai ${VERSION}: ${checks} checks`);
