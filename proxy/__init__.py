"""The recording proxy: dialects, lineage, exact continuation, upstream, recorder."""
