"""Rotary positions: keys moved to their ranks in the cache, and the rotary embedding of a model's configuration."""
