// OpenAI's SDK for Node: its streams, parsers, tool runner and errors.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { City, TURNS, answer, exactly, model, oslo, parameters, question, url } from "./asked.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
const messages = [{ role: "user", content: question }];
const names = ["weather", "time"];
const chatTools = names.map((name) => ({ type: "function", function: { name, parameters } }));
const tools = names.map((name) => ({ type: "function", name, parameters, strict: false }));

test("models", async () => {
  for await (const { id } of client.models.list()) {
    assert.equal((await client.models.retrieve(id)).id, id);
  }
});

test("chat", async () => {
  const reply = await client.chat.completions.create({ model, messages });
  assert.equal(reply.choices[0].message.content.trim(), answer);
  assert.ok(reply.usage.completion_tokens);
});

test("chat stream", async () => {
  const options = { include_usage: true };
  const stream = client.chat.completions.stream({ model, messages, stream_options: options });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, final.choices[0].message.content);
  assert.equal((await stream.totalUsage()).total_tokens, final.usage.total_tokens);
});

test("chat choices and logprobs", async () => {
  const asked = { model, messages, n: 2, logprobs: true, top_logprobs: 1 };
  const reply = await client.chat.completions.create(asked);
  assert.equal(reply.choices.length, 2);
  assert.ok(reply.choices[0].logprobs.content.length);
});

test("chat parsed", async () => {
  const said = [{ role: "user", content: exactly }];
  const format = zodResponseFormat(City, "city");
  const reply = await client.chat.completions.parse({ model, messages: said, response_format: format });
  assert.deepEqual(reply.choices[0].message.parsed, oslo);
});

for (const streamed of [false, true]) {
  test(`chat tools, streamed ${streamed}`, async () => {
    const history = [...messages];
    for (let turn = 0; turn < TURNS; turn++) {
      const asked = { model, messages: history, tools: chatTools };
      const reply = streamed
        ? await client.chat.completions.stream(asked).finalChatCompletion()
        : await client.chat.completions.create(asked);
      const { message } = reply.choices[0];
      assert.deepEqual(message.tool_calls.map((call) => call.function.name), names);
      history.push(message);
      for (const { id, function: called } of message.tool_calls) {
        history.push({ role: "tool", tool_call_id: id, content: called.arguments });
      }
      history.push({ role: "user", content: "And again?" });
    }
  });

  test(`tool runner, streamed ${streamed}`, async () => {
    const cities = [];
    const weather = ({ city }) => cities.push(city) && `Sunny in ${city}.`;
    const run = { name: "weather", parameters, parse: JSON.parse, function: weather };
    const asked = { model, messages, tools: [{ type: "function", function: run }], stream: streamed };
    assert.equal((await client.chat.completions.runTools(asked).finalContent()).trim(), answer);
    assert.equal(cities.length, 1);
  });

  for (const by of ["items", "previous"]) {
    test(`responses tools by ${by}, streamed ${streamed}`, async () => {
      let input = [...messages];
      let previous_response_id;
      for (let turn = 0; turn < TURNS; turn++) {
        const asked = { model, input, tools, previous_response_id };
        asked.include = ["reasoning.encrypted_content"];
        const reply = streamed
          ? await client.responses.stream(asked).finalResponse()
          : await client.responses.create(asked);
        const calls = reply.output.filter(({ type }) => type === "function_call");
        assert.deepEqual(calls.map(({ name }) => name), names);
        const next = calls.map((call) => ({
          type: "function_call_output",
          call_id: call.call_id,
          output: call.arguments,
        }));
        next.push({ role: "user", content: "And again?" });
        input = by === "items" ? [...input, ...reply.output, ...next] : next;
        if (by === "previous") previous_response_id = reply.id;
      }
    });
  }
}

test("completions", async () => {
  const reply = await client.completions.create({ model, prompt: "Two and two" });
  assert.ok(reply.choices[0].text);
});

test("responses", async () => {
  const reply = await client.responses.create({ model, input: question });
  assert.equal(reply.output_text.trim(), answer);
  assert.equal((await client.responses.retrieve(reply.id)).id, reply.id);
  const items = [];
  for await (const item of client.responses.inputItems.list(reply.id)) items.push(item.type);
  assert.deepEqual(items, ["message"]);
  const count = await client.responses.inputTokens.count({ model, input: question });
  assert.equal(count.input_tokens, reply.usage.input_tokens);
  await client.responses.delete(reply.id);
  await assert.rejects(client.responses.retrieve(reply.id), OpenAI.NotFoundError);
});

test("responses stream", async () => {
  const reasoning = { effort: "low", summary: "auto" };
  const kinds = [];
  const stream = client.responses.stream({ model, input: question, reasoning });
  for await (const { type } of stream) kinds.push(type);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  assert.ok((await stream.finalResponse()).usage.output_tokens_details.reasoning_tokens);
});

test("responses parsed", async () => {
  const text = { format: zodTextFormat(City, "city") };
  const reply = await client.responses.parse({ model, input: exactly, text });
  assert.deepEqual(reply.output_parsed, oslo);
});

test("conversations", async () => {
  const said = { type: "message", role: "user", content: "The code is blue." };
  const made = await client.conversations.create({ items: [said] });
  const reply = await client.responses.create({ model, input: question, conversation: made.id });
  assert.equal(reply.conversation.id, made.id);
  const kept = [];
  for await (const one of client.conversations.items.list(made.id, { order: "asc" })) {
    kept.push(one.role ?? one.type);
  }
  assert.deepEqual(kept.slice(0, 2), ["user", "user"]);
  assert.ok(kept.length > 2);
  assert.equal((await client.conversations.delete(made.id)).deleted, true);
  await assert.rejects(client.conversations.retrieve(made.id), OpenAI.NotFoundError);
  const asked = client.responses.create({ model, input: question, conversation: "conv_1" });
  await assert.rejects(asked, OpenAI.APIError);
});

test("errors", async () => {
  const hot = client.chat.completions.create({ model, messages, temperature: "hot" });
  await assert.rejects(hot, OpenAI.BadRequestError);
  const number = client.responses.create({ model, input: 7 });
  await assert.rejects(number, OpenAI.BadRequestError);
  await assert.rejects(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
});
