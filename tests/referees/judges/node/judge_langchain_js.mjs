// LangChain for JavaScript with the packages of three providers.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatGoogleGenerativeAI } from "@langchain/google-genai";
import { ChatOpenAI } from "@langchain/openai";
import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";
import { City, TURNS, answer, exactly, model, oslo, question, url } from "./asked.mjs";

const configuration = { baseURL: `${url}/v1` };
const plain = { model, apiKey: "k", maxRetries: 0 };
const models = {
  chat: () => new ChatOpenAI({ ...plain, configuration, useResponsesApi: false }),
  responses: () => new ChatOpenAI({ ...plain, configuration, useResponsesApi: true }),
  anthropic: () => new ChatAnthropic({ ...plain, anthropicApiUrl: url, maxTokens: 999 }),
  google: () => new ChatGoogleGenerativeAI({ ...plain, baseUrl: url }),
};
const weather = tool(({ city }) => `Sunny in ${city}.`, {
  name: "weather",
  description: "Return the weather of a city.",
  schema: z.object({ city: z.string() }),
});
const methods = {
  chat: "jsonSchema",
  responses: "jsonSchema",
  anthropic: "jsonSchema",
  google: "jsonSchema",
};

for (const [provider, made] of Object.entries(models)) {
  test(`${provider} text`, async () => {
    const reply = await made().invoke(question);
    assert.equal(reply.text.trim(), answer);
    assert.ok(reply.usage_metadata.total_tokens);
  });

  test(`${provider} stream`, async () => {
    let text = "";
    for await (const chunk of await made().stream(question)) text += chunk.text;
    assert.equal(text.trim(), answer);
  });

  test(`${provider} object`, async () => {
    const shaped = made().withStructuredOutput(City, { name: "city", method: methods[provider] });
    assert.deepEqual(await shaped.invoke(exactly), oslo);
  });

  for (const streamed of [false, true]) {
    test(`${provider} tools, streamed ${streamed}`, async () => {
      const bound = made().bindTools([weather]);
      const messages = [];
      const next = async () => {
        if (!streamed) return bound.invoke(messages);
        let whole;
        for await (const chunk of await bound.stream(messages)) whole = whole?.concat(chunk) ?? chunk;
        return whole;
      };
      for (let turn = 0; turn < TURNS; turn++) {
        messages.push(new HumanMessage(question));
        const reply = await next();
        assert.deepEqual(reply.tool_calls.map(({ name }) => name), ["weather"]);
        messages.push(reply);
        for (const call of reply.tool_calls) {
          const content = await weather.invoke(call.args);
          messages.push(new ToolMessage({ content, tool_call_id: call.id, name: call.name }));
        }
        const last = await next();
        assert.equal(last.text.trim(), answer);
        messages.push(last);
      }
    });
  }
}
