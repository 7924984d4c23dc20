"""Vectors as plain lists: what the papers' algorithms are written with."""

import math
import operator
from typing import TypeAlias

Vector: TypeAlias = list[float]


def dot(a: Vector, b: Vector) -> float:
    """The inner product of two vectors."""
    return float(sum(map(operator.mul, a, b)))


def softmax(logits: Vector) -> Vector:
    """Probabilities in proportion to the exponentials; the largest logit is taken out first, so nothing overflows."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]
