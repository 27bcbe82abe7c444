"""OpenAI Responses, the API of Codex and the OpenAI Agents SDK."""
