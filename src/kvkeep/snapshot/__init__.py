"""A sequence's memory as an object: copied, saved, restored.

Importing this package imports no torch: `file_format` and `positions` say what a file holds without it.
"""
