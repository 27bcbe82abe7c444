"""OpenAI chat completions and legacy completions, the shapes that engines speak themselves."""
