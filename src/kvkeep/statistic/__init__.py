"""The statistics that a policy can ask attention to report, each with the reduction that defines it.

A statistic is reduced block by block inside attention, so the full (rows × keys) matrix never exists. All statistics
transform the probabilities of each query head, average over the query heads of a group, and then compare or sum over
rows, always in float32. `Peak` and `Worst` take a maximum instead.
"""

from kvkeep.statistic.base import Mass, MassAndLast, Nothing, RowMasses, Rows, Statistic
from kvkeep.statistic.bits import BITS, ones, ring, ring_span, word_names
from kvkeep.statistic.highest import LastHit, Peak, Worst
from kvkeep.statistic.low import Low, LowRows

__all__ = [
    "BITS",
    "LastHit",
    "Low",
    "LowRows",
    "Mass",
    "MassAndLast",
    "Nothing",
    "Peak",
    "RowMasses",
    "Rows",
    "Statistic",
    "Worst",
    "ones",
    "ring",
    "ring_span",
    "word_names",
]
