"""Training samples from a session's token tree, and the account of every sampled token.

``rules`` decides for all readers which tokens are trained; ``builders`` turns branches into
samples.
"""
