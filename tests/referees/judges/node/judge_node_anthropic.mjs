// Anthropic's SDK for Node: its streams, parsers, tool runner, beta features and errors.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";
import { City, TURNS, exactly, model, oslo, parameters, question, url } from "./asked.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "k", maxRetries: 0 });
const messages = [{ role: "user", content: question }];
const names = ["weather", "time"];
const tools = names.map((name) => ({ name, input_schema: parameters }));
const thinking = { type: "enabled", budget_tokens: 1024 };
const asked = { model, max_tokens: 999, messages };
const kinds = ({ content }) => content.map(({ type }) => type);

test("models", async () => {
  for await (const { id } of client.models.list()) {
    assert.equal((await client.models.retrieve(id)).type, "model");
  }
});

test("message", async () => {
  const reply = await client.messages.create({ ...asked, thinking });
  assert.deepEqual(kinds(reply), ["thinking", "text"]);
  assert.equal(reply.stop_reason, "end_turn");
});

test("count", async () => {
  const counted = await client.messages.countTokens({ model, messages });
  const reply = await client.messages.create(asked);
  assert.equal(counted.input_tokens, reply.usage.input_tokens);
});

test("stream", async () => {
  const stream = client.messages.stream({ ...asked, thinking });
  const heard = new Set();
  stream.on("text", () => heard.add("text")).on("thinking", () => heard.add("thinking"));
  stream.on("signature", () => heard.add("signature"));
  const final = await stream.finalMessage();
  assert.deepEqual([...heard].sort(), ["signature", "text", "thinking"]);
  assert.ok(final.usage.output_tokens_details.thinking_tokens);
});

test("parsed", async () => {
  const output_config = { format: zodOutputFormat(City) };
  const said = [{ role: "user", content: exactly }];
  const reply = await client.messages.parse({ ...asked, messages: said, output_config });
  assert.deepEqual(reply.parsed_output, oslo);
});

for (const streamed of [false, true]) {
  test(`tools, streamed ${streamed}`, async () => {
    const history = [...messages];
    for (let turn = 0; turn < TURNS; turn++) {
      const body = { ...asked, messages: history, tools, thinking };
      const reply = streamed
        ? await client.messages.stream(body).finalMessage()
        : await client.messages.create(body);
      assert.equal(reply.stop_reason, "tool_use");
      const calls = reply.content.filter(({ type }) => type === "tool_use");
      assert.deepEqual(calls.map(({ name }) => name), names);
      const results = calls.map(({ id, input }) => ({
        type: "tool_result",
        tool_use_id: id,
        content: input.city,
      }));
      history.push({ role: "assistant", content: reply.content });
      history.push({ role: "user", content: [...results, { type: "text", text: "And again?" }] });
    }
  });

  test(`tool runner, streamed ${streamed}`, async () => {
    const cities = [];
    const weather = betaZodTool({
      name: "weather",
      description: "Return the weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      run: ({ city }) => cities.push(city) && `Sunny in ${city}.`,
    });
    const runner = client.beta.messages.toolRunner({ ...asked, tools: [weather], stream: streamed });
    const last = await runner.runUntilDone();
    assert.deepEqual(kinds(last), ["thinking", "text"]);
    assert.equal(cities.length, 1);
  });
}

test("beta features that a model on the engine has", async () => {
  const betas = ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"];
  const reply = await client.beta.messages.create({ ...asked, betas, thinking });
  assert.deepEqual(kinds(reply), ["thinking", "text"]);
  const stream = client.beta.messages.stream({ ...asked, betas, thinking });
  assert.deepEqual(kinds(await stream.finalMessage()), ["thinking", "text"]);
  const counted = await client.beta.messages.countTokens({ model, messages, betas });
  assert.ok(counted.input_tokens);
});

test("errors", async () => {
  for (const wrong of [{ messages: [] }, { temperature: "hot" }, { max_tokens: -1 }]) {
    await assert.rejects(client.messages.create({ ...asked, ...wrong }), Anthropic.BadRequestError);
  }
  const servers = [{ type: "url", name: "files", url: "https://example.org" }];
  const beta = client.beta.messages.create({ ...asked, mcp_servers: servers });
  await assert.rejects(beta, Anthropic.BadRequestError);
  await assert.rejects(client.models.retrieve("no-such-model"), Anthropic.NotFoundError);
});
