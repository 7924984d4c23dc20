"""lm-eval's tasks under eviction: ``scoring`` does the work, and ``model`` has the class that lm-eval knows.

``command`` runs lm-eval's own command line, and reads the arguments of that class.

Only ``model`` and ``command`` import lm-eval.
"""
