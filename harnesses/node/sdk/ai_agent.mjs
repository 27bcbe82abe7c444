// A small shell agent on the AI SDK: node ai_agent.mjs chat|responses|messages TASK
//
// It reads the base URL and the key of the API from the environment and prints its answer.
import { execFileSync } from "node:child_process";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { isStepCount, jsonSchema, streamText, tool } from "ai";

const [api, prompt] = process.argv.slice(2);
const { ANTHROPIC_BASE_URL, OPENAI_API_KEY, OPENAI_BASE_URL } = process.env;
const anthropicKey = process.env.ANTHROPIC_AUTH_TOKEN ?? process.env.ANTHROPIC_API_KEY;
const model = process.env.OPENAI_MODEL ?? "policy";
const models = {
  chat: () =>
    createOpenAICompatible({ name: "local", baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })(model),
  responses: () => createOpenAI().responses(model),
  messages: () =>
    createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, authToken: anthropicKey })(model),
};

const shell = tool({
  description: "Run a shell command in the working directory and return what it prints.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { command: { type: "string" } },
    required: ["command"],
  }),
  execute: ({ command }) => execFileSync("sh", ["-c", command], { encoding: "utf8", timeout: 60_000 }),
});

const running = streamText({
  model: models[api](),
  system: "Do the task with the shell, then answer in one line.",
  prompt,
  tools: { shell },
  stopWhen: isStepCount(64),
  onError: ({ error }) => {
    console.error(error);
    process.exitCode = 1;
  },
});
console.log(await running.text);
