"""``bridle demo``: the whole loop on a small LangChain agent, from nothing to a better policy."""
