"""Batch jobs: reading lines of requests (`lines`, `survey`), writing completions (`output`), and resuming."""
