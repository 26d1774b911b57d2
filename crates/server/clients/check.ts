// Drives a running server with the official TypeScript client.
//
//     npm install openai typescript @types/node
//     npx tsc --target es2022 --module nodenext --types node --skipLibCheck check.ts
//     node check.js http://127.0.0.1:8000 demo
//
// Exits with 1 at the first thing that is not as it should be.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, model] = process.argv.slice(2) as [string, string];
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user" as const, content: "Say hello. 你好 👋" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};

async function chat() {
  const asked = { model, messages, max_tokens: 64, temperature: 0, seed: 1 };
  const whole = await client.chat.completions.create(asked);
  let text = "";
  let usage: OpenAI.CompletionUsage | null | undefined;
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    usage = chunk.usage ?? usage;
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole.choices[0]!.message.content);
  assert.equal(usage?.completion_tokens, whole.usage?.completion_tokens);
}

async function progress() {
  // Events that the client does not know do it no harm.
  const stream = await client.chat.completions.create(
    { model, messages, max_tokens: 8, stream: true },
    { headers: { "x-progress": "true" } },
  );
  let finishes = 0;
  for await (const chunk of stream) finishes += chunk.choices[0]?.finish_reason ? 1 : 0;
  assert.equal(finishes, 1);
}

async function stopped() {
  const stream = await client.chat.completions.create({
    model, messages, max_tokens: 4000, stream: true, stop_token_ids: [],
    ignore_eos: true,
  } as OpenAI.ChatCompletionCreateParamsStreaming);
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content || chunk.choices.length) break;
  }
  // The request ends with its connection.
  for (let i = 0; ; i += 1) {
    const load = await (await fetch(`${base}/load`)).json() as { open: number; running: number };
    if (load.open === 0 && load.running === 0) return;
    assert.ok(i < 500, JSON.stringify(load));
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

async function tools() {
  const runner = client.chat.completions.stream({
    model,
    max_tokens: 64,
    messages: [{ role: "user", content: "What is the weather in Rome?" }],
    tools: [{ type: "function", function: { name: "weather", parameters } }],
  });
  const final = await runner.finalChatCompletion();
  for (const call of final.choices[0]!.message.tool_calls ?? []) {
    if (call.type === "function") JSON.parse(call.function.arguments);
  }
}

async function schema() {
  const form = {
    type: "object",
    properties: { city: { type: "string", maxLength: 12 } },
    required: ["city"],
    additionalProperties: false,
  };
  const whole = await client.chat.completions.create({
    model, messages, max_tokens: 200, seed: 1, reasoning_effort: "none",
    response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema: form } },
  });
  assert.deepEqual(Object.keys(JSON.parse(whole.choices[0]!.message.content!)), ["city"]);
}

async function responses() {
  const stream = await client.responses.create({
    model, input: "Say hello.", max_output_tokens: 64, temperature: 0, stream: true,
  });
  let text = "";
  let last: OpenAI.Responses.Response | undefined;
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.completed" || event.type === "response.incomplete") {
      last = event.response;
    }
  }
  assert.ok(last);
  const message = last.output.find((item) => item.type === "message");
  const part = message?.type === "message" ? message.content[0] : undefined;
  assert.equal(text, part?.type === "output_text" ? part.text : "");
}

async function refusals() {
  await assert.rejects(
    client.chat.completions.create({ model, messages, temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
  await assert.rejects(
    client.chat.completions.create({ model: "nobody", messages }),
    (error) => error instanceof OpenAI.NotFoundError,
  );
}

for (const check of [chat, progress, stopped, tools, schema, responses, refusals]) {
  await check();
  console.log(`${check.name}: ok`);
}
