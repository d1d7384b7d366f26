import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.probe.curves import fit_line, interpolate, left_out_error, mean, median, percentile, predict_by_line
from shardwise.vocabulary.cluster import CollectiveCurve, CurvePoint

SIZES = [2**power for power in range(16, 28)]


def line_points(latency: float, per_byte: float, sizes: list[int] = SIZES) -> list[CurvePoint]:
    return [CurvePoint(bytes=size, seconds=latency + per_byte * size) for size in sizes]


def test_order_statistics() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert percentile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert percentile([7.0], 0.95) == 7.0


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_an_exact_line_is_found(latency: float, per_byte: float) -> None:
    line = fit_line(line_points(latency, per_byte))
    assert line.latency_seconds == pytest.approx(latency, rel=1e-4, abs=1e-9)
    assert line.seconds_per_byte == pytest.approx(per_byte, rel=1e-4)


def test_each_size_counts_by_its_relative_error() -> None:
    # The largest size is 3 % off; an unweighted fit would turn that into a latency 40 times too large.
    points = line_points(100e-6, 1e-9)
    points[-1] = CurvePoint(bytes=points[-1].bytes, seconds=points[-1].seconds * 1.03)
    assert fit_line(points).latency_seconds == pytest.approx(100e-6, rel=0.1)


def test_negative_terms_are_refused() -> None:
    falling = [CurvePoint(bytes=1000, seconds=2.0), CurvePoint(bytes=2000, seconds=1.0)]
    assert fit_line(falling).seconds_per_byte == 0.0
    curved = [CurvePoint(bytes=size, seconds=1e-9 * size**1.3) for size in SIZES]
    assert fit_line(curved).latency_seconds == 0.0
    assert fit_line(curved).seconds_per_byte > 0


def test_one_point_is_a_rate() -> None:
    line = fit_line([CurvePoint(bytes=1000, seconds=0.5)])
    assert (line.latency_seconds, line.seconds_per_byte) == (0.0, 0.0005)


def test_tables_are_straight_in_bytes_and_keep_their_ends() -> None:
    points = [CurvePoint(bytes=100, seconds=1.0), CurvePoint(bytes=10_000, seconds=4.0)]
    assert interpolate(points, 5_050) == pytest.approx(2.5)
    assert interpolate(points, 10) == 1.0
    assert interpolate(points, 20_000) == pytest.approx(8.0)
    assert interpolate(points, 100) == 1.0
    assert interpolate(points, 10_000) == pytest.approx(4.0)


def test_left_out_error_judges_inner_sizes_only() -> None:
    points = line_points(100e-6, 1e-9)
    assert left_out_error(points, predict_by_line) == pytest.approx(0.0, abs=1e-9)
    assert left_out_error(points[:2], predict_by_line) is None
    spoiled = list(points)
    middle = len(points) // 2
    spoiled[middle] = CurvePoint(bytes=points[middle].bytes, seconds=2 * points[middle].seconds)
    error = left_out_error(spoiled, interpolate)
    assert error is not None
    # One of the judged sizes is predicted at half of its time, each of its neighbors at up to twice theirs.
    judged = [point for point in points[1:-1] if point.bytes >= 2**20]
    assert 0.5 / len(judged) < error < (0.5 + 2 * 1.0 + 0.1) / len(judged)


def test_small_sizes_are_judged_where_there_are_no_large_ones() -> None:
    assert left_out_error(line_points(1e-4, 1e-9, [8, 64, 512]), predict_by_line) == pytest.approx(0.0, abs=1e-6)


def test_a_curve_reads_itself_and_refuses_an_empty_table() -> None:
    points = tuple(line_points(100e-6, 1e-9))
    curve = CollectiveCurve(op="all_gather", ranks=4, points=points)
    for point in points:
        assert curve.seconds_at(point.bytes) == pytest.approx(point.seconds)
    assert curve.seconds_at(3 * points[-1].bytes) == pytest.approx(3 * points[-1].seconds)
    assert curve.seconds_at(1) == points[0].seconds
    with pytest.raises(ValueError, match="all_gather over 4 ranks is empty"):
        CollectiveCurve(op="all_gather", ranks=4, points=()).seconds_at(8)
