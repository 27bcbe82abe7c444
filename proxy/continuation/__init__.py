"""Exact prompts: the recorded ids of the call that is continued, followed by the new ones.

``continuation`` makes the prompt, ``tail`` renders the new messages alone, and ``probe`` tests
whether a chat template allows that (``report`` puts the result in words). ``prompt`` compares the
ids that the engine used with those that it continues.
"""
