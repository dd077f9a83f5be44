"""Torchmetrics inside a fit: what is computed when, and what copies do. Two workers are two states of one metric."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import Metric

from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.fit.metrics import LocalMetrics


class Fit:
    """When workers are apart, and the metrics of that fit."""

    def __init__(self) -> None:
        self.apart = False
        self.metrics = LocalMetrics(FixedWorkers(), lambda: not self.apart)

    def __enter__(self) -> Fit:
        self.metrics.install()
        return self

    def __exit__(self, *_: Any) -> None:
        self.metrics.restore()

    def meet(self) -> None:
        self.apart = False
        self.metrics.forget()


def of_two(state: Tensor, group: Any = None) -> list[Tensor]:
    """What two workers gather whose states differ by 10."""
    return [state, state + 10]


def available() -> bool:
    return True


def made(**options: Any) -> torchmetrics.SumMetric:
    return torchmetrics.SumMetric(dist_sync_fn=of_two, distributed_available_fn=available, **options)


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_class() -> Iterator[None]:
    before = Metric.sync, Metric.__getstate__
    yield
    assert (Metric.sync, Metric.__getstate__) == before


def test_a_value_is_this_workers_own_while_they_are_apart_and_everyones_when_they_have_met() -> None:
    metric = made()
    with Fit() as fit:
        fit.apart = True
        metric.update(1.0)
        assert metric.compute() == 1.0
        fit.meet()
        assert metric.compute() == 12.0
    assert metric.compute() == 12.0


def test_metrics_made_and_copied_inside_a_fit_are_covered() -> None:
    metric = made()
    metric.update(1.0)
    with Fit() as fit:
        fit.apart = True
        others = [made(), copy.deepcopy(metric), metric.clone(), pickle.loads(pickle.dumps(metric))]
        others[0].update(1.0)
        assert [float(other.compute()) for other in others] == [1.0] * 4
        fit.meet()
        assert [float(other.compute()) for other in others] == [12.0] * 4
        for other in others:  # each of its own states
            other.update(1.0)
        assert metric.compute() == 12.0


def test_a_copy_does_not_take_the_own_value_to_the_epochs_end() -> None:
    metric = made()
    with Fit() as fit:
        fit.apart = True
        metric.update(1.0)
        metric.compute()
        clone = metric.clone()
        fit.meet()
        assert clone.compute() == 12.0


def test_a_trackers_copies_see_all_workers() -> None:
    tracker = torchmetrics.MetricTracker(made(), maximize=True)
    with Fit() as fit:
        for _ in range(2):
            fit.apart = False
            tracker.increment()
            tracker.update(1.0)
            assert tracker.compute() == 12.0
            fit.apart = True
            tracker.update(0.0)


def test_a_pickle_of_a_fit_holds_nothing_of_ours() -> None:
    model = torch.nn.Module()
    model.metrics = torchmetrics.MetricCollection({"sum": made(), "mean": torchmetrics.MeanMetric()})
    with Fit() as fit:
        fit.apart = True
        model.metrics.update(1.0)
        model.metrics.compute()
        file = io.BytesIO()
        torch.save(model, file)
    assert b"lightning_gossip" not in file.getvalue()


def test_the_users_own_caching_and_availability_stay() -> None:
    metric = made(compute_with_cache=False)
    alone = torchmetrics.SumMetric(dist_sync_fn=of_two, distributed_available_fn=lambda: False)
    attributes = [dict(vars(one)) for one in (metric, alone)]
    with Fit():
        alone.update(1.0)
        assert alone.compute() == 1.0
        assert [vars(one).keys() for one in (metric, alone)] == [old.keys() for old in attributes]
        assert not metric.compute_with_cache
        assert alone.compute_with_cache


def test_fits_may_be_nested_and_end_in_any_order() -> None:
    outer, inner, metric = Fit(), Fit(), made()
    synchronize = Metric.sync
    outer.metrics.install()
    inner.metrics.install()
    inner.apart = True
    metric.update(1.0)
    assert metric.compute() == 1.0
    outer.metrics.restore()
    outer.metrics.restore()
    metric.update(1.0)
    assert metric.compute() == 2.0
    inner.metrics.restore()
    assert metric.compute() == 14.0
    assert Metric.sync is synchronize


def test_an_epoch_that_ends_with_an_error_leaves_no_own_value() -> None:
    metric = made()
    with Fit() as fit:
        fit.apart = True
        metric.update(1.0)
        metric.compute()
    assert metric.compute() == 12.0
