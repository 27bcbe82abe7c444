"""The policies of recipes, tests and benchmarks: tiny ones made here, and SmolLM2-135M."""
