// The `ollama` package of npm: chats whole and streamed, prompts, vectors, models, errors.
import assert from "node:assert";
import { Ollama } from "ollama";

const model = process.env.PARALLM_MODEL_NAME;
const client = new Ollama({ host: process.env.PARALLM_URL.replace(/\/v1$/, "") });
const messages = [{ role: "user", content: "hello" }];
const options = { temperature: 0, num_predict: 24 };

const whole = await client.chat({ model, messages, options });
let said = "";
let last;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  said += part.message.content;
  last = part;
}
assert.equal(said, whole.message.content);
assert(last.done && last.eval_count === whole.eval_count);
const form = { type: "object", properties: { n: { enum: [1, 2] } }, required: ["n"], additionalProperties: false };
const formed = await client.chat({ model, messages, format: form, options: { ...options, num_predict: 200 } });
assert([1, 2].includes(JSON.parse(formed.message.content).n));
const first = await client.generate({ model, prompt: "hello", options });
assert((await client.generate({ model, prompt: "and", context: first.context, options })).done);
assert.equal((await client.embed({ model, input: ["a", "b"] })).embeddings.length, 2);
assert((await client.list()).models.some((each) => each.name === model));
assert((await client.ps()).models.some((each) => each.name === model));
assert((await client.show({ model })).capabilities.includes("completion"));
await assert.rejects(client.chat({ model: "no-such-model", messages }), (error) => error.status_code === 404);
console.log("ollama of npm: all as its package expects");
