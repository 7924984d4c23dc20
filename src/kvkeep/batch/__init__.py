"""Batch jobs: reading lines (`lines`, `survey`, `batch`), writing completions (`output`), and resuming."""
