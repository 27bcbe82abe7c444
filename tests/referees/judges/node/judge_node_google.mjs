// Google's SDK for Node: its chats, automatic function calls, schemas and errors.
import { ApiError, GoogleGenAI, Type } from "@google/genai";
import assert from "node:assert/strict";
import { test } from "node:test";
import { TURNS, answer, exactly, model, oslo, question, url } from "./asked.mjs";

const client = new GoogleGenAI({ apiKey: "k", httpOptions: { baseUrl: url } });
const config = { thinkingConfig: { includeThoughts: true } };
const city = { type: Type.OBJECT, properties: { city: { type: Type.STRING } }, required: ["city"] };
const asked = { model, contents: question, config };

test("models", async () => {
  for await (const { name } of await client.models.list()) {
    assert.equal((await client.models.get({ model: name })).name, name);
  }
});

test("content", async () => {
  const reply = await client.models.generateContent(asked);
  assert.equal(reply.text.trim(), answer);
  const counted = await client.models.countTokens({ model, contents: question });
  assert.equal(counted.totalTokens, reply.usageMetadata.promptTokenCount);
});

test("content stream", async () => {
  const chunks = [];
  for await (const chunk of await client.models.generateContentStream(asked)) chunks.push(chunk);
  const parts = chunks.flatMap(({ candidates }) => candidates?.[0]?.content?.parts ?? []);
  assert.ok(parts.some(({ thought }) => thought));
  assert.ok(chunks.at(-1).usageMetadata.thoughtsTokenCount);
});

test("parsed", async () => {
  const schema = {
    type: Type.OBJECT,
    properties: { name: { type: Type.STRING }, people: { type: Type.INTEGER } },
  };
  const form = { responseMimeType: "application/json", responseSchema: schema };
  const reply = await client.models.generateContent({ model, contents: exactly, config: form });
  assert.deepEqual(JSON.parse(reply.text), oslo);
});

for (const streamed of [false, true]) {
  test(`chat, streamed ${streamed}`, async () => {
    const chat = client.chats.create({ model, config });
    for (let turn = 0; turn < TURNS; turn++) {
      if (streamed) {
        for await (const _ of await chat.sendMessageStream({ message: question }));
      } else {
        await chat.sendMessage({ message: question });
      }
      assert.ok(chat.getHistory(true).length >= 2 * (turn + 1));
    }
  });

  test(`tools, streamed ${streamed}`, async () => {
    const functionDeclarations = ["weather", "time"].map((name) => ({ name, parameters: city }));
    const chat = client.chats.create({ model, config: { ...config, tools: [{ functionDeclarations }] } });
    let message = question;
    for (let turn = 0; turn < TURNS; turn++) {
      const calls = [];
      if (streamed) {
        for await (const chunk of await chat.sendMessageStream({ message })) {
          calls.push(...(chunk.functionCalls ?? []));
        }
      } else {
        calls.push(...(await chat.sendMessage({ message })).functionCalls);
      }
      assert.deepEqual(calls.map(({ name }) => name), ["weather", "time"]);
      message = calls.map(({ id, name, args }) => ({
        functionResponse: { id, name, response: { result: args.city } },
      }));
      message.push({ text: "And again?" });
    }
  });
}

test("automatic calls", async () => {
  const cities = [];
  const weather = {
    tool: async () => ({ functionDeclarations: [{ name: "weather", parameters: city }] }),
    callTool: async (calls) => {
      cities.push(...calls.map(({ args }) => args.city));
      return calls.map(({ id, name, args }) => ({
        functionResponse: { id, name, response: { result: args.city } },
      }));
    },
  };
  const tools = { ...config, tools: [weather] };
  const reply = await client.models.generateContent({ ...asked, config: tools });
  assert.equal(reply.text.trim(), answer);
  assert.equal(cities.length, 1);
});

test("errors", async () => {
  const hot = client.models.generateContent({ ...asked, config: { temperature: -1 } });
  await assert.rejects(hot, ApiError);
  await assert.rejects(client.models.get({ model: "models/no-such-model" }), ApiError);
});
