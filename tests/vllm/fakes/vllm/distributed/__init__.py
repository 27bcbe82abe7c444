"""A stand-in for vLLM, of which the tests need what lies below."""
