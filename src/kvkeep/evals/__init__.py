"""Evaluations: the quality that a policy costs at a budget, measured with caches that really evict.

`grid` lists the cells to measure, `run` fills them, `records` stores one JSON line per cell, `report` and `curves` show
them.
"""
