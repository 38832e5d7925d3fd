// The openai package of npm: a chat streamed and whole is one text; errors come as its classes.
import OpenAI from "openai";

const model = process.env.PARALLM_MODEL_NAME;
const client = new OpenAI({ baseURL: process.env.PARALLM_URL + "/v1", apiKey: "none", maxRetries: 0 });
const body = { model, messages: [{ role: "user", content: "12+35=" }], max_tokens: 8, temperature: 0 };

const whole = await client.chat.completions.create(body);
let text = "";
for await (const part of await client.chat.completions.create({ ...body, stream: true })) {
  text += part.choices[0]?.delta?.content ?? "";
}
if (text !== whole.choices[0].message.content) throw new Error(`${text} is not ${whole.choices[0].message.content}`);

try {
  await client.chat.completions.create({ ...body, model: "nobody" });
  throw new Error("an unknown model was taken");
} catch (error) {
  if (!(error instanceof OpenAI.NotFoundError)) throw error;
}
console.log(`openai of npm: ${JSON.stringify(text)}`);
