"""The cache that transformers sees (`bounded_cache`), and the steps of its layers: append, attend, observe, evict."""
