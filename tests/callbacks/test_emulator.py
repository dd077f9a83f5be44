"""The emulator without a Trainer: its hooks are called as the loop calls them."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gossip import ConfigurationError
from lightning_gossip.callbacks import ClusterEmulator


def run_batches(
    emulator: ClusterEmulator, batches: int, *, rank: int = 0, work_s: float = 0.002, backward: bool = True
) -> list[float]:
    """Ends of the batches, the start of the first one before them."""
    trainer: Any = SimpleNamespace(world_size=4, global_rank=rank)
    emulator.setup(trainer, trainer, "fit")
    emulator.on_train_epoch_start()
    ends = [time.monotonic()]
    for _ in range(batches):
        emulator.on_train_batch_start()
        time.sleep(work_s / 2)
        if backward:
            emulator.on_before_backward()
        time.sleep(work_s / 2)
        emulator.on_train_batch_end()
        ends.append(time.monotonic())
    return ends


def last(ends: list[float], period_s: float) -> bool:
    """Whether batches last so long: half of them no less, and not all of them more, since a busy machine delays some."""
    seconds = [end - begin for begin, end in pairwise(ends)]
    return statistics.median(seconds) >= 0.95 * period_s and min(seconds) <= 1.05 * period_s


@pytest.mark.alone
@pytest.mark.parametrize("backward", [True, False])
def test_a_batch_lasts_the_period_times_the_factor(backward: bool) -> None:
    emulator = ClusterEmulator({3: 2.0}, period_s=0.02)
    ends = run_batches(emulator, 12, rank=3, backward=backward)
    assert last(ends, 0.04), ends


@pytest.mark.alone
def test_other_workers_keep_the_period() -> None:
    ends = run_batches(ClusterEmulator({3: 10.0}, period_s=0.02), 20, rank=1)
    assert last(ends, 0.02), ends


@pytest.mark.alone
def test_without_a_period_the_own_work_is_stretched() -> None:
    ends = run_batches(ClusterEmulator({0: 4.0}), 12, work_s=0.01)
    per_batch_s = (ends[-1] - ends[2]) / 10
    plain = run_batches(ClusterEmulator(), 12, work_s=0.01)
    assert per_batch_s / ((plain[-1] - plain[2]) / 10) == pytest.approx(4.0, rel=0.3)


@pytest.mark.alone
def test_time_lost_by_waiting_for_others_is_not_made_up_for() -> None:
    emulator = ClusterEmulator(period_s=0.02)
    run_batches(emulator, 3)
    emulator.on_train_batch_start()
    emulator.on_before_backward()
    time.sleep(0.1)  # an all-reduce that waits for somebody
    emulator.on_train_batch_end()
    started_s = time.monotonic()
    emulator.on_train_batch_start()
    emulator.on_before_backward()
    emulator.on_train_batch_end()
    assert time.monotonic() - started_s > 0.015


@pytest.mark.alone
def test_a_rendezvous_is_not_part_of_a_batch() -> None:
    emulator = ClusterEmulator(period_s=0.02)
    run_batches(emulator, 3)
    time.sleep(0.1)
    ends = run_batches(emulator, 5)
    assert last(ends, 0.02), ends


@pytest.mark.parametrize("jitter", ["exponential", "uniform"])
def test_jitter_has_mean_one_and_a_stream_for_each_rank(jitter: Any) -> None:
    draws = []
    for rank in (0, 0, 1):
        emulator = ClusterEmulator(period_s=1.0, jitter=jitter, spread=0.5, seed=7)
        trainer: Any = SimpleNamespace(world_size=4, global_rank=rank)
        emulator.setup(trainer, trainer, "fit")
        draws.append([emulator._multiplier() for _ in range(4000)])
    assert draws[0] == draws[1] != draws[2]
    assert sum(draws[0]) / 4000 == pytest.approx(1.0, abs=0.05)
    assert min(draws[0]) >= 0.5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"slowdown": {0: 0.5}}, "0.5"),
        ({"slowdown": {-1: 2.0}}, "-1"),
        ({"slowdown": {"a": 2.0}}, "'a'"),
        ({"period_s": 0.0}, "period_s"),
        ({"jitter": "gaussian"}, "gaussian"),
        ({"spread": 1.5}, "spread"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ClusterEmulator(**options)


def test_a_rank_that_does_not_exist_is_refused_before_training() -> None:
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0)
    with pytest.raises(ConfigurationError, match=r"\[2, 5\].*2 workers"):
        ClusterEmulator({0: 2.0, 2: 2.0, 5: 2.0}).setup(trainer, trainer, "fit")
