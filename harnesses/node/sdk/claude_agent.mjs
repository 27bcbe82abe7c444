// A small agent on the Claude Agent SDK: node claude_agent.mjs CLAUDE TASK
//
// CLAUDE is the path of the Claude Code program. The agent prints its answer.
import { query } from "@anthropic-ai/claude-agent-sdk";

const [program, prompt] = process.argv.slice(2);
const options = {
  pathToClaudeCodeExecutable: program,
  allowedTools: ["Bash"],
  permissionMode: "bypassPermissions",
  allowDangerouslySkipPermissions: true,
};
for await (const message of query({ prompt, options })) {
  if (message.type !== "result") continue;
  if (message.subtype !== "success") {
    console.error(message);
    process.exitCode = 1;
  }
  console.log(message.result ?? "");
}
