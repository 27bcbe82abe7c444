"""Where the groups of a training step come from.

``book`` decides when groups begin and which a step takes, ``collector`` runs them while the policy
trains. ``replay`` keeps earlier successes, which a step trains again.
"""
