"""The decode step in C++: compiled for the machine at first use, and only where that works.

`ops` are its functions on tensors; they say ``None`` where torch has to do the work. `native` tells whether and why.
"""

from kvkeep.native.build import Native, native

__all__ = ["Native", "native"]
