"""Batch jobs: reading lines (`input`, `survey`), writing completions (`output`), and resuming."""
