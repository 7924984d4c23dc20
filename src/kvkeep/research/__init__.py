"""Checks of the papers: their theorems, what they saw in models, and how near a policy comes to hindsight."""
