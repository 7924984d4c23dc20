"""The search for the smallest memory that keeps a share of the full cache's quality.

`candidates` lists what is searched, `search` decides what is measured next, `quality` says what a measurement shows,
`documents` holds the questions, `measure` runs them, `records` stores them, and `report` shows them.
"""
