"""Eviction policies, one file each; the file's name is the policy's name.

A policy is a score: it never touches storage, attention, the model or the server. To add one, put a file into this
folder; `kvkeep.policies.registry` finds it.
"""

DEFAULT = "snapkv:default"
"""The policy of every cache, engine, plan and command that names none.

Few late rows and wide pooling find what a question at the end of a prompt asks for. Generated tokens compete with the
chosen ones, and the newest 64 stay, which long answers need. ``docs/choose-a-policy.md`` has the figures.
"""

LATER = "keydiff:later"
"""The policy of remembered texts and of conversations, whose questions come after the text was cut to the budget."""
