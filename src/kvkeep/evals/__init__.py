"""Evaluations: the quality that a policy costs at a budget, measured with caches that really evict.

`plan` lists the cells of a grid, `run` fills them, `records` stores one JSON line per cell, `report` and `curves` show
them.
"""
