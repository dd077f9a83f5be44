import io
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.staleness import StalenessHistogram, VersionCounter
from lightning_gossip.errors import ConfigurationError, ProtocolError

VALUES = st.lists(st.integers(0, 40), max_size=60)


def histogram_of(values: list[int]) -> StalenessHistogram:
    histogram = StalenessHistogram()
    for value in values:
        histogram.record(value)
    return histogram


def test_the_staleness_of_a_step_is_the_changes_between_its_pull_and_its_push() -> None:
    counter = VersionCounter()
    counter.changed()
    pulled = counter.version
    assert counter.staleness(pulled) == 0
    counter.changed()
    counter.changed()
    assert counter.staleness(pulled) == 2


def test_with_each_pull_after_the_own_push_n_round_robin_workers_have_staleness_n_minus_1() -> None:
    counter, n = VersionCounter(), 5
    pulled = [counter.version] * n
    staleness = []
    for step in range(20 * n):
        worker = step % n
        staleness.append(counter.staleness(pulled[worker]))
        counter.changed()
        pulled[worker] = counter.version
    assert staleness[n:] == [n - 1] * (19 * n)


def test_a_version_from_the_future_is_our_fault() -> None:
    with pytest.raises(ProtocolError, match="pulled version 3 of a model that is at version 0"):
        VersionCounter().staleness(3)


def test_a_loaded_counter_continues() -> None:
    counter = VersionCounter()
    counter.changed()
    resumed = VersionCounter()
    resumed.load_state_dict(counter.state_dict())
    assert resumed.changed() == 2


@pytest.mark.parametrize("state", [{}, {"version": -1}, {"version": 1.5}])
def test_a_counter_state_that_cannot_be_read_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="version"):
        VersionCounter().load_state_dict(state)


def test_an_empty_histogram_is_all_zeros() -> None:
    empty = StalenessHistogram()
    assert (empty.count, empty.mean, empty.max, empty.quantile(0.0), empty.quantile(1.0)) == (0, 0.0, 0, 0, 0)
    assert empty.counts() == {}


@given(VALUES.filter(bool))
def test_count_mean_max_and_counts_are_those_of_the_values(values: list[int]) -> None:
    histogram = histogram_of(values)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(np.mean(values))
    assert histogram.max == max(values)
    assert histogram.counts() == {value: values.count(value) for value in sorted(set(values))}


@given(VALUES.filter(bool), st.integers(0, 100))
def test_a_quantile_is_the_smallest_value_that_enough_steps_do_not_exceed(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    needed = max(1, -(-percent * len(values) // 100))  # the exact ceiling, in integers
    assert histogram_of(values).quantile(percent / 100) == ordered[needed - 1]


def test_a_quantile_is_not_moved_by_the_rounding_of_q() -> None:
    assert 0.07 * 100 > 7
    assert histogram_of(list(range(1, 101))).quantile(0.07) == 7


@given(VALUES, VALUES)
def test_merging_is_recording_both(first: list[int], second: list[int]) -> None:
    merged = histogram_of(first)
    other = histogram_of(second)
    merged.merge(other)
    assert merged.counts() == histogram_of(first + second).counts()
    assert other.counts() == histogram_of(second).counts()


def test_a_histogram_can_be_merged_with_itself() -> None:
    histogram = histogram_of([1, 4])
    histogram.merge(histogram)
    assert histogram.counts() == {1: 2, 4: 2}


@given(VALUES)
def test_the_state_survives_torch_and_json(values: list[int]) -> None:
    histogram = histogram_of(values)
    buffer = io.BytesIO()
    torch.save(histogram.state_dict(), buffer)
    buffer.seek(0)
    for state in (torch.load(buffer, weights_only=True), json.loads(json.dumps(histogram.state_dict()))):
        resumed = histogram_of([9, 9])  # what was there is replaced
        resumed.load_state_dict(state)
        assert resumed.counts() == histogram.counts()


def test_memory_grows_with_the_distinct_values_only() -> None:
    histogram = histogram_of([step % 3 for step in range(10_000)])
    assert len(histogram.state_dict()["counts"]) == 3


def test_counts_is_a_copy() -> None:
    histogram = histogram_of([1])
    histogram.counts()[1] = 100
    assert histogram.count == 1


def test_numpy_integers_are_recorded_as_plain_ones() -> None:
    histogram = histogram_of([np.int64(2)])  # type: ignore[list-item]
    assert [type(value) for value in histogram.counts()] == [int]


@pytest.mark.parametrize("value", [-1, 0.5, None, math.nan])
def test_what_is_no_staleness_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="integer >= 0"):
        StalenessHistogram().record(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [-0.1, 1.1, 95, math.nan])
def test_what_is_no_share_is_refused(q: float) -> None:
    with pytest.raises(ConfigurationError, match=r"share in \[0, 1\]"):
        StalenessHistogram().quantile(q)


@pytest.mark.parametrize("state", [{}, {"counts": 3}, {"counts": [[1]]}, {"counts": [[1, -2]]}, {"counts": [["a", 1]]}])
def test_a_histogram_state_that_cannot_be_read_is_refused_and_changes_nothing(state: dict[str, object]) -> None:
    histogram = histogram_of([2])
    with pytest.raises(ConfigurationError):
        histogram.load_state_dict(state)
    assert histogram.counts() == {2: 1}
