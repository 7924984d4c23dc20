"""Past one process, on Ray: a job's lines (`crew`, `worker`), datasets (`ray`), replicas of a server (`serving`)."""

EXTRA = "kvkeep[ray]"
"""What has to be installed for it."""
