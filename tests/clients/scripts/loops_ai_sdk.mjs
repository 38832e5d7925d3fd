// Vercel's AI SDK by its four ways to a ring: texts, tool loops, named and parallel calls, typed answers, whole and
// streamed, stored turns, and a client that goes in the middle; against a worker that obeys.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const name = process.env.PARALLM_MODEL_NAME;
const to = { baseURL: process.env.PARALLM_URL + "/v1", apiKey: "none" };
const openai = createOpenAI(to);
const compatible = createOpenAICompatible({ name: "ring", ...to, supportsStructuredOutputs: true, includeUsage: true });
const models = {
  responses: openai(name),
  chat: openai.chat(name),
  compatible: compatible.chatModel(name),
  anthropic: createAnthropic(to)(name),
};
const city = z.object({ city: z.string(), country: z.string(), people: z.number().int() });
const about = { system: "The city is city='Bern', country='Switzerland', people 134000.", prompt: "Give me the city." };
const loop = {
  system: "Call double_number with value 21, then reply exactly RESULT:42.",
  prompt: "Do it.",
  stopWhen: stepCountIs(5),
};
const failed = [];
let passed = 0;

const doubling = (seen) => ({
  double_number: tool({
    description: "Double a number",
    inputSchema: z.object({ value: z.number().int() }),
    execute: async ({ value }) => (seen.push(value), value * 2),
  }),
});

async function check(what, proof) {
  try {
    await proof();
    passed += 1;
  } catch (error) {
    failed.push(what);
    console.log(what, error.message, error.responseBody ?? "");
  }
}

for (const [kind, model] of Object.entries(models)) {
  const ask = (body) => generateText({ model, maxRetries: 0, ...body });
  const stream = (body) => streamText({ model, maxRetries: 0, onError: () => {}, ...body });

  await check(`${kind}: text`, async () => {
    const answer = await ask({ prompt: "Reply exactly READY_42", maxOutputTokens: 50, temperature: 0.5, topP: 0.9 });
    assert.equal(answer.text, "READY_42");
    assert.equal(answer.finishReason, "stop");
    assert(answer.usage.inputTokens > 0);
  });
  await check(`${kind}: stream`, async () => {
    const answer = stream({ prompt: "Reply exactly READY_42" });
    let text = "";
    for await (const part of answer.textStream) text += part;
    assert.equal(text, "READY_42");
    assert((await answer.usage).outputTokens > 0);
  });
  await check(`${kind}: tool loop, gone on with`, async () => {
    const seen = [];
    const answer = await ask({ ...loop, tools: doubling(seen) });
    assert.deepEqual(seen, [21]);
    assert.equal(answer.text, "RESULT:42");
    const earlier = [{ role: "user", content: "Do it." }, ...answer.response.messages];
    const messages = [...earlier, { role: "user", content: "Reply exactly AGAIN" }];
    assert.equal((await ask({ messages, tools: doubling(seen) })).text, "AGAIN");
  });
  await check(`${kind}: tool loop streamed`, async () => {
    const seen = [];
    const kinds = new Set();
    for await (const part of stream({ ...loop, tools: doubling(seen) }).fullStream) kinds.add(part.type);
    assert.deepEqual(seen, [21]);
    for (const each of ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result", "finish"])
      assert(kinds.has(each), each);
  });
  for (const choice of ["required", { type: "tool", toolName: "double_number" }])
    await check(`${kind}: tool choice ${JSON.stringify(choice)}`, async () => {
      const answer = await ask({ prompt: "Hello 5", tools: doubling([]), toolChoice: choice });
      assert.deepEqual(answer.toolCalls[0].input, { value: 5 });
      const named = choice !== "required" && ["chat", "compatible"].includes(kind); // "stop", as OpenAI's chats say
      assert.equal(answer.finishReason, named ? "stop" : "tool-calls");
    });
  await check(`${kind}: no tool may be called`, async () => {
    const answer = await ask({ prompt: "Reply exactly NOTHING", tools: doubling([]), toolChoice: "none" });
    assert.equal(answer.text, "NOTHING");
  });
  await check(`${kind}: parallel calls`, async () => {
    const seen = [];
    const one = (letter) =>
      tool({ inputSchema: z.object({ x: z.number() }), execute: async ({ x }) => (seen.push(letter + x), letter) });
    const system = "In the same turn call alpha with x=1 and beta with x=2. Then reply exactly BOTH_DONE.";
    const tools = { alpha: one("alpha"), beta: one("beta") };
    const answer = await ask({ system, prompt: "go", tools, stopWhen: stepCountIs(4) });
    assert.deepEqual(seen.sort(), ["alpha1", "beta2"]);
    assert.equal(answer.text, "BOTH_DONE");
    assert.equal(answer.steps.length, 2);
  });
  await check(`${kind}: objects`, async () => {
    assert.equal((await generateObject({ model, maxRetries: 0, schema: city, ...about })).object.city, "Bern");
    assert.equal((await ask({ output: Output.object({ schema: city }), ...about })).output.country, "Switzerland");
    const rain = await ask({ output: Output.choice({ options: ["sun", "rain"] }), prompt: "Which weather? rain" });
    assert.equal(rain.output, "rain");
  });
  await check(`${kind}: object streamed`, async () => {
    const answer = streamObject({ model, maxRetries: 0, schema: city, ...about });
    for await (const _ of answer.partialObjectStream);
    assert.equal((await answer.object).people, 134000);
  });
  await check(`${kind}: a client that goes`, async () => {
    const away = new AbortController();
    let parts = 0;
    let aborted = false;
    for await (const part of stream({ prompt: "x ".repeat(300), abortSignal: away.signal }).fullStream) {
      aborted ||= part.type === "abort";
      if (++parts === 3) away.abort();
    }
    assert(aborted);
  });
  await check(`${kind}: a tool that fails`, async () => {
    const broken = async () => {
      throw new Error("no such thing");
    };
    const tools = { look: tool({ inputSchema: z.object({ q: z.string() }), execute: broken }) };
    const answer = await ask({ system: "Call look with q='x'.", prompt: "Look", tools, stopWhen: stepCountIs(3) });
    assert.match(answer.text, /no such thing/);
  });
}

const model = models.responses;
await check("responses: store false", async () => {
  const providerOptions = { openai: { store: false, include: ["reasoning.encrypted_content"] } };
  const answer = await generateText({ model, maxRetries: 0, ...loop, tools: doubling([]), providerOptions });
  assert.equal(answer.text, "RESULT:42");
});
await check("responses: behind an earlier one", async () => {
  const prompt = "Remember the word ORCHID. Reply only STORED.";
  const earlier = (await generateText({ model, maxRetries: 0, prompt })).providerMetadata.openai.responseId;
  const providerOptions = { openai: { previousResponseId: earlier } };
  const answer = await generateText({ model, maxRetries: 0, prompt: "What word? Reply with the word", providerOptions });
  assert.equal(answer.text, "ORCHID");
});
console.log(`${passed} of ${passed + failed.length}: ${failed.length ? failed.join("; ") : "all"}`);
process.exit(failed.length ? 1 : 0);
