"""From a session's token tree to training samples, and the account of every sampled token.

``rules`` decides which tokens are trained, for everyone; ``builders`` lays branches out as samples;
``sample_store`` keeps samples in the store.
"""
