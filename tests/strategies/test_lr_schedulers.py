from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from lightning_gossip.strategies.data.lr_schedulers import GlobalCount, GlobalCountScheduler


def test_a_step_schedule_moves_to_the_global_count_and_keeps_its_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    count = 0
    schedule = GlobalCountScheduler(inner, lambda: count, frequency=2)
    optimizer.step()
    for count, rate in [(1, 1.0), (2, 0.5), (3, 0.5), (8, 0.0625), (8, 0.0625)]:  # noqa: B007 - read by the schedule
        schedule.step()
        assert schedule.get_last_lr() == [rate]
    assert schedule.state_dict() == inner.state_dict()
    assert schedule.optimizer is optimizer
    resumed = GlobalCountScheduler(inner, lambda: 10, frequency=2)
    resumed.start_from(8)
    resumed.step()
    assert resumed.get_last_lr() == [0.03125]


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.data())
def test_an_epoch_moves_step_schedules_by_the_steps_that_lightning_estimates_however_it_is_cut(
    batches: int, workers: int, accumulation: int, data: st.DataObject
) -> None:
    batches = max(batches, workers)
    planned = math.ceil(math.ceil(batches / workers) / accumulation)
    count = GlobalCount(batches, workers)
    count.begin(7, [])
    counts = []
    for epoch in range(2):
        for taken in range(1, batches + 1):
            count.advance(Fraction(taken, batches), accumulation)
            counts.append(count())
        assert count() == 7 + (epoch + 1) * planned
        count.end_epoch()
        assert count() == 7 + (epoch + 1) * planned
    assert counts == sorted(counts)

    stopped = Fraction(data.draw(st.integers(0, batches - 1)), batches)
    saved = count.state(stopped)
    resumed = GlobalCount(batches, data.draw(st.integers(1, 8)))
    resumed.begin(0, [])
    resumed.load(saved, stopped)
    assert resumed() == saved["count"]
    resumed.advance(Fraction(1), accumulation)
    assert resumed() == 7 + 3 * planned
    anew = GlobalCount(batches, workers)
    anew.begin(0, [])
    anew.load(saved, Fraction(0))
    assert anew() == 7 + 2 * planned


def test_a_schedule_that_followed_a_tuners_count_follows_the_new_one() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    config = LRSchedulerConfig(inner, interval="step")
    for _ in range(2):
        count = GlobalCount(4, 2)
        count.begin(0, [config])
        assert config.scheduler.scheduler is inner
    count.advance(Fraction(1, 2), 1)
    optimizer.step()
    config.scheduler.step()
    assert inner.get_last_lr() == [0.5]
