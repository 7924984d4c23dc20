"""The papers' algorithms and theorems as running checks, and what a cache costs: nothing here knows a model."""
