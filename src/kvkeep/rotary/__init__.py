"""Rotary positions: the rank of a slot among the kept ones, and the angles that a model's configuration defines."""
