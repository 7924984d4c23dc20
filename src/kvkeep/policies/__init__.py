"""Eviction policies, one file each; the file's name is the policy's name.

A policy is a score: it never touches storage, attention, the model or the server. To add one, put a file into this
folder; `kvkeep.policies.registry` finds it.
"""

DEFAULT = "snapkv:decode=score,window=8,kernel=13,recent=64"
"""The policy of every cache, engine, plan and command that names none.

Few late rows and wide pooling find what a question at the end of a prompt asks for. Generated tokens compete with the
chosen ones, and the newest 64 stay, which long answers need. ``docs/choose-a-policy.md`` has the figures.
"""

LATER = "keydiff:recent=8,sinks=4"
"""The policy of remembered texts and of conversations, whose questions come after the text was cut to the budget."""
