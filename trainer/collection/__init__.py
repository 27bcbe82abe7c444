"""The sources of the groups of a training step.

``collector`` runs groups while the policy trains; ``book`` decides when they begin and which a step
takes, and ``curriculum`` chooses their tasks. ``branching`` chooses the calls at which groups of
siblings re-enter earlier sessions. ``recorded`` takes groups that are recorded already. ``replay``
keeps earlier successes, which a step trains again. ``renumbering`` maps policy versions of earlier
attempts to present ones.
"""
