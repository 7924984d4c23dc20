"""Research equipment: the papers' theorems as checks, their observations on any model, and caches with hindsight."""
