"""The sources of the groups of a training step.

``background`` runs groups while the policy trains. ``collector`` takes whole groups, and ``book``
decides when they begin and which a step takes; ``sessions`` and ``session_book`` do so for single
sessions. ``curriculum`` chooses the tasks of groups. ``branching`` chooses the calls at which
groups of siblings re-enter earlier sessions. ``recorded`` takes groups that are recorded already.
``replay`` keeps earlier successes, which a step trains again. ``renumbering`` maps policy versions
of earlier attempts to present ones.
"""
