"""Batch jobs: reading lines (`lines`, `survey`, `openai`), writing completions (`output`), and resuming."""
