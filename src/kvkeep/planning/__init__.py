"""What a model costs before it is loaded.

Shapes come from `families` or `model_shapes`, bytes from `cost`, a memory's speed from `bandwidth`, and the rows that
fit from `plan`.
"""
