// The AI SDK with six providers: texts, objects, tools in six steps, and errors.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogle } from "@ai-sdk/google";
import { createMistral } from "@ai-sdk/mistral";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createXai } from "@ai-sdk/xai";
import { Output, generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { test } from "node:test";
import { City, TURNS, answer, exactly, oslo, parameters, question, url } from "./asked.mjs";

const baseURL = `${url}/v1`;
const apiKey = "k";
const name = "policy"; // The providers know limits of models by their names.
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  "openai chat": openai.chat(name),
  "openai responses": openai.responses(name),
  compatible: createOpenAICompatible({ name: "local", baseURL, apiKey, supportsStructuredOutputs: true })(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
  google: createGoogle({ baseURL: `${url}/v1beta`, apiKey })(name),
  mistral: createMistral({ baseURL, apiKey })(name),
  xai: createXai({ baseURL, apiKey }).responses(name),
};

for (const [provider, model] of Object.entries(models)) {
  const asked = { model, maxRetries: 0 };

  test(`${provider} text`, async () => {
    const reply = await generateText({ ...asked, prompt: question });
    assert.equal(reply.text.trim(), answer);
    assert.equal(reply.finishReason, "stop");
    assert.ok(reply.usage.outputTokens);
  });

  test(`${provider} stream`, async () => {
    const stream = streamText({ ...asked, prompt: question, onError() {} });
    const kinds = new Set();
    for await (const part of stream.stream ?? stream.fullStream) {
      kinds.add(part.type);
      if (part.type === "error") throw part.error;
    }
    assert.ok(kinds.has("text-delta"));
    assert.equal((await stream.text).trim(), answer);
  });

  test(`${provider} object`, async () => {
    const output = Output.object({ schema: City });
    assert.deepEqual((await generateText({ ...asked, prompt: exactly, output })).output, oslo);
  });

  for (const streamed of [false, true]) {
    test(`${provider} tools, streamed ${streamed}`, async () => {
      const called = [];
      const execute = ({ city }) => called.push(city) && `Sunny in ${city}.`;
      const weather = tool({ inputSchema: jsonSchema(parameters), execute });
      const messages = [];
      for (let turn = 0; turn < TURNS; turn++) {
        messages.push({ role: "user", content: question });
        const body = { ...asked, messages, tools: { weather }, stopWhen: isStepCount(TURNS) };
        const reply = streamed ? streamText({ ...body, onError() {} }) : await generateText(body);
        assert.equal((await reply.text).trim(), answer);
        messages.push(...(await reply.responseMessages));
        assert.equal(called.length, turn + 1);
      }
    });
  }

  test(`${provider} error`, async () => {
    const prompt = [{ role: "user", content: question }];
    const refused = { name: "AI_APICallError", statusCode: 400 };
    await assert.rejects(generateText({ ...asked, prompt, topP: 7 }), refused);
  });
}
