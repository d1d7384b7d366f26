"""Arithmetic on measured times: order statistics, the line t = a + b * bytes, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.vocabulary.cluster import CollectiveCurve, CurvePoint
from shardwise.vocabulary.units import MIB


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle ones if the number is even."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def mean(values: Sequence[float]) -> float:
    """The sum over the number."""
    return sum(values) / len(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, kw_only=True)
class Line:
    """t = latency_seconds + seconds_per_byte * bytes."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """The predicted time of a message."""
        return self.latency_seconds + self.seconds_per_byte * num_bytes


def fit_line(points: Sequence[CurvePoint]) -> Line:
    """Least squares of t = a + b * bytes with weights 1/t^2, so that every size counts by its relative error.

    An unweighted fit would see the largest size alone, and its latency would be noise. Negative values are refused by
    the physics: where the best line has one, the other is fitted alone.

    Args:
        points: At least one, of positive size and time.
    """
    assert points, "no points to fit"
    # Scaled by 1/t: 1 = a * (1/t) + b * (bytes/t).
    u = [1 / point.seconds for point in points]
    v = [point.bytes / point.seconds for point in points]
    uu, vv, uv = sum(x * x for x in u), sum(x * x for x in v), sum(x * y for x, y in zip(u, v, strict=True))
    only_latency = Line(latency_seconds=sum(u) / uu, seconds_per_byte=0.0)
    only_rate = Line(latency_seconds=0.0, seconds_per_byte=sum(v) / vv)
    determinant = uu * vv - uv * uv
    if len({point.bytes for point in points}) < 2 or determinant <= 0:
        return only_rate
    latency = (sum(u) * vv - sum(v) * uv) / determinant
    per_byte = (uu * sum(v) - uv * sum(u)) / determinant
    if per_byte < 0:
        return only_latency
    return only_rate if latency < 0 else Line(latency_seconds=latency, seconds_per_byte=per_byte)


def interpolate(points: Sequence[CurvePoint], num_bytes: float) -> float:
    """The time of a message read from a table, as every reader of a Cluster does it."""
    return CollectiveCurve(op="all_reduce", ranks=2, points=tuple(points)).seconds_at(num_bytes)


def left_out_error(
    points: Sequence[CurvePoint],
    predict: Callable[[Sequence[CurvePoint], float], float],
    at_least_bytes: int = MIB,
) -> float | None:
    """Mean |predicted / measured - 1| where each inner size in turn is predicted from all the others.

    The smallest and the largest size stay, as nothing is predicted beyond what was measured. Sizes below
    `at_least_bytes` are judged only if no inner size is larger. None if there is no inner size.
    """
    inner = range(1, len(points) - 1)
    judged = [i for i in inner if points[i].bytes >= at_least_bytes] or list(inner)
    errors = [
        abs(predict([*points[:i], *points[i + 1 :]], points[i].bytes) / points[i].seconds - 1) for i in judged
    ]  # fmt: skip
    return sum(errors) / len(errors) if errors else None


def predict_by_line(points: Sequence[CurvePoint], num_bytes: float) -> float:
    """The time of a message from the line fitted to `points`."""
    return fit_line(points).seconds(num_bytes)
