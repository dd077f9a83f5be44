from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from lightning_gossip.strategies.data.lr_schedulers import StepSchedules, moves


class Counter:
    """A schedule that counts how often it was moved."""

    def __init__(self) -> None:
        self.moved = 0

    def step(self) -> None:
        self.moved += 1


def step(scheduler: Any) -> None:
    scheduler.step()


def config(frequency: int = 1, **options: Any) -> Any:
    return LRSchedulerConfig(Counter(), interval="step", frequency=frequency, **options)  # type: ignore[arg-type]


def moved(configs: list[Any]) -> list[int]:
    return [one.scheduler.moved for one in configs]


# -- the rule ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Trainer:
    """A Trainer of one worker with a schedule, without a strategy of this package."""
    made = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    made.strategy._lightning_module = module = LightningModule()
    module.trainer = made
    made.strategy.lr_scheduler_configs = [config()]
    return made


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.data())
def test_moves_are_those_of_lightnings_own_loop(
    alone: Trainer, batches: int, accumulation: int, frequency: int, data: st.DataObject
) -> None:
    alone.fit_loop.max_batches, alone.accumulate_grad_batches = batches, accumulation
    alone.strategy.lr_scheduler_configs = [schedule := config(frequency)]
    loop = alone.fit_loop.epoch_loop
    cut = data.draw(st.integers(1, batches))
    for done in range(1, cut + 1):
        loop.batch_progress.current.ready = done
        loop.batch_progress.is_last_batch = done == cut  # what a hook that returns -1 does, or the epoch's end
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        of = cut if done == cut else batches
        assert schedule.scheduler.moved == moves(done, of=of, accumulation=accumulation, frequency=frequency)


@given(st.integers(1, 30), st.integers(1, 6), st.data())
def test_with_one_worker_schedules_move_as_in_lightnings_own_loop(
    alone: Trainer, batches: int, frequency: int, data: st.DataObject
) -> None:
    """Also where the accumulation changes inside an epoch, by a callback or with a resume."""
    alone.fit_loop.max_batches, alone.accumulate_grad_batches = batches, 1
    alone.strategy.lr_scheduler_configs = [theirs := config(frequency)]
    loop, ours, schedules = alone.fit_loop.epoch_loop, config(frequency), StepSchedules(batches, 1, step)
    for epoch in range(2):
        for done in range(1, batches + 1):
            if data.draw(st.booleans()):
                alone.accumulate_grad_batches = data.draw(st.integers(1, 5))
                if data.draw(st.booleans()):
                    saved, schedules = schedules.state([ours]), StepSchedules(batches, 1, step)
                    schedules.load(saved, [ours])
            loop.batch_progress.current.ready = done
            loop.batch_progress.is_last_batch = done == batches
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            schedules.advance(epoch, Fraction(done, batches), alone.accumulate_grad_batches, before=Fraction(done - 1, batches))
            if not loop._should_accumulate():
                schedules.move([ours])
            assert ours.scheduler.moved == theirs.scheduler.moved


# -- schedules that follow it --------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=2), st.data())
def test_all_workers_schedules_move_as_lightnings_whatever_each_sees_of_the_epoch(
    batches: int, workers: int, accumulation: int, frequencies: list[int], data: st.DataObject
) -> None:
    """Also if all leave an epoch early, or resume in its middle on as many workers or others."""
    batches = max(batches, workers)
    nominal = math.ceil(batches / workers)
    configs = [[config(frequency) for frequency in frequencies] for _ in range(workers)]
    schedules = [StepSchedules(batches, workers, step) for _ in range(workers)]
    expected = [0] * len(frequencies)
    for epoch in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.integers(1, batches))  # batches that are taken
        cut = data.draw(st.booleans())
        for mine, theirs in zip(schedules, configs, strict=True):
            taken = sorted(data.draw(st.sets(st.integers(1, end), max_size=5)))
            before = moved(theirs)
            for position in taken:
                mine.advance(epoch, Fraction(position, batches), accumulation)
                mine.move(theirs)
                done = position * nominal // batches
                for one, began, now, frequency in zip(theirs, before, moved(theirs), frequencies, strict=True):
                    assert now == began + moves(done, of=nominal, accumulation=accumulation, frequency=frequency)
                    assert one.scheduler.moved == now
            mine.advance(epoch, Fraction(taken[-1] if taken else 1, batches), accumulation)
            mine.end_epoch(epoch, Fraction(end, batches), theirs, cut=cut)
        done = end * nominal // batches
        of = done if cut else nominal
        expected = [
            total + moves(done, of=of, accumulation=accumulation, frequency=frequency)
            for total, frequency in zip(expected, frequencies, strict=True)
        ]
        assert [moved(theirs) for theirs in configs] == [expected] * workers


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_fit_that_resumes_ends_where_one_that_was_not_stopped_does(
    batches: int, workers: int, accumulation: int, frequency: int, workers_then: int, data: st.DataObject
) -> None:
    batches = max(batches, workers, workers_then)
    nominal = math.ceil(batches / workers)
    whole = moves(nominal, of=nominal, accumulation=accumulation, frequency=frequency)
    one, first = config(frequency), StepSchedules(batches, workers, step)
    stopped = data.draw(st.integers(1, batches))
    for taken in range(1, stopped + 1):
        first.advance(3, Fraction(taken, batches), accumulation)
        first.move([one])
    if data.draw(st.booleans()):
        first.end_epoch(3, Fraction(stopped, batches), [one], cut=False)
    stood = one.scheduler.moved
    second = StepSchedules(batches, workers_then, step)
    second.load(first.state([one]), [one])
    begins_anew = data.draw(st.booleans())
    for taken in range(1 if begins_anew else stopped + 1, batches + 1):
        second.advance(3, Fraction(taken, batches), accumulation, before=Fraction(9, 10))
        second.move([one])
        assert one.scheduler.moved >= stood
    second.end_epoch(3, Fraction(1), [one], cut=False)
    assert one.scheduler.moved == whole
    second.advance(4, Fraction(1), accumulation)
    second.move([one])
    assert one.scheduler.moved == 2 * whole


def test_a_checkpoint_of_the_end_of_an_epoch_begins_the_next_one_where_schedules_are() -> None:
    one, first = config(), StepSchedules(12, 2, step)
    first.advance(0, Fraction(1), 1)
    first.move([one])
    second = StepSchedules(12, 2, step)
    second.load(first.state([one]), [one])
    second.advance(1, Fraction(1, 2), 1)
    second.move([one])
    assert one.scheduler.moved == 6 + 3


def test_without_a_state_an_epoch_goes_on_where_lightnings_loop_does() -> None:
    """After a checkpoint that DDP has written in the middle of an epoch: its schedules have moved in the first part of it."""
    one, schedules = config(), StepSchedules(10, 1, step)
    for batch in range(5, 11):
        schedules.advance(2, Fraction(batch, 10), 1, before=Fraction(batch - 1, 10))
        schedules.move([one])
    assert one.scheduler.moved == 6


def test_a_schedule_that_was_replaced_moves_no_more_and_one_that_comes_later_moves_from_there() -> None:
    schedules, configs = StepSchedules(20, 2, step), [config(), config(2), config(reduce_on_plateau=True)]
    first = configs[0]
    configs[2].reduce_on_plateau = True
    for batch in range(1, 11):
        if batch == 6:
            configs[0] = config()
        if batch == 8:
            configs.append(config(3))
        schedules.advance(0, Fraction(batch, 10), 1)
        schedules.move(configs)
    assert first.scheduler.moved == 5
    assert moved(configs) == [5, 5, 0, 1]
    schedules.advance(1, Fraction(1), 1)
    schedules.end_epoch(1, Fraction(1), configs, cut=False)
    assert moved(configs) == [15, 10, 0, 4]


def test_epochs_that_grow_move_schedules_further() -> None:
    schedules, one = StepSchedules(6, 2, step), config()
    for epoch, batches in enumerate((6, 12, 18)):
        schedules.resize(batches)
        schedules.advance(epoch, Fraction(1), 1)
        schedules.move([one])
    assert one.scheduler.moved == 3 + 6 + 9


def test_a_torch_schedule_is_moved_as_it_is() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    schedules = StepSchedules(8, 2, step)
    schedules.advance(0, Fraction(3, 4), 1)
    schedules.move([LRSchedulerConfig(schedule, interval="step")])
    assert schedule.get_last_lr() == [0.125]
