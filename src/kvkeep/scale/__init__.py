"""Past one process, on Ray: a job's lines (`crew`, `worker`), datasets (`ray`), replicas of a server (`serving`)."""

EXTRA = "ray"
"""The extra that has what is needed for it."""
