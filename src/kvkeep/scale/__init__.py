"""Past one process, on Ray: jobs (`driver`, `worker`), datasets (`ray_data`), replicas of a server (`ray_serve`)."""

EXTRA = "ray"
"""The extra that has what is needed for it."""
