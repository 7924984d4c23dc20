"""Batch files: reading the requests, writing the completions, and going on where a job was stopped."""
