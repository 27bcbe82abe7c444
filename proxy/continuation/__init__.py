"""Exact prompts: the recorded ids of the call that is continued, plus what is new.

``continuation`` makes the prompt, ``tail`` renders the new messages alone, and ``probe`` tries
whether a chat template allows that (``report`` puts the result in words). ``prompt`` judges the ids
that the engine used, and ``explanations`` finds out after the commit why they differ (``breaks``).
"""
