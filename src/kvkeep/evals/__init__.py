"""Evaluations: what a policy costs in quality at a budget, measured on the path that runs.

`plan` says which cells there are, `run` fills them, `records` keeps one JSON line per cell, `report` reads them.
"""
