"""Many prompts at once, each in its constant block of KV memory: requests in, tokens out.

A row is all that a sequence ever needs, so admission asks whether a row is free, nothing is preempted unless
rows are to take turns (``host_rows``), and the memory is known before the first token.
"""

from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Event, Request, Result
from kvkeep.engine.session import Session

__all__ = ["Engine", "Event", "Request", "Result", "Session"]
