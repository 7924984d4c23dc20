"""The lab: the papers' theorems and observations, caches with hindsight, a fleet simulator, a load generator."""
