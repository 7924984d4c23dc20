"""lm-eval's tasks under eviction: ``scoring`` and ``writing`` do the work, ``model`` is the class that lm-eval knows.

Only ``model`` and ``command`` import lm-eval.
"""
