"""Learning rate schedules by step that follow the work done by all workers.

With shared work a fast worker makes more steps than a slow one. If each moved its own schedule, learning rates would differ and
the fast one would move past the end of a OneCycleLR. So schedules follow what all have done: as if all were equally fast, each
worker has B = ⌈batches / workers⌉ batches in an epoch, and when a share of the epoch is done, ⌊share · B⌋ of them are. Then **a
schedule has moved as often as Lightning moves it in so many batches**: once after each step that falls on a multiple of its
``frequency``. With equal static shares these are each worker's own batches, and its schedules move as under DDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


def moves(done: int, *, of: int, accumulation: int, frequency: int) -> int:
    """How often Lightning moves a schedule by step in the first batches of an epoch.

    It steps after every ``accumulation`` batches and after the last one, and moves the schedule there if the batches are a
    multiple of ``frequency``. Both begin anew in each epoch.

    Args:
        done: batches; more than ``of`` where Lightning adds one, in a fit that resumes at an epoch's end under ``max_steps``.
        of: batches in the epoch.
        accumulation: batches a step.
        frequency: of the schedule, in batches.

    >>> [moves(done, of=10, accumulation=4, frequency=2) for done in range(11)]
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    """
    within = min(done, of)
    last = within == of and of % frequency == 0 and of % accumulation != 0
    return within // math.lcm(accumulation, frequency) + last + done // frequency - within // frequency


@dataclass
class _Followed:
    """One schedule, and how often it has moved: now, and when the epoch under way began."""

    scheduler: Any
    frequency: int
    began: int
    moved: int = 0


class StepSchedules:
    """The schedules by step of one fit, which move to where the epoch is.

    Which they are is asked for whenever they move: a callback may replace one. One that comes later moves from there.

    Args:
        batches: of a whole epoch, of all workers.
        workers: among which they are reckoned to be dealt out, also when fewer or more are there later on.
        move: moves a scheduler once.
    """

    def __init__(self, batches: int, workers: int, move: Callable[[Any], None]) -> None:
        self._workers = workers
        self._batches = math.ceil(batches / workers)  # of each worker if all were equally fast
        self._move = move
        self._accumulation = 1
        self._epoch: int | None = None  # whose batches are counted; None before the first one
        self._done = 0  # batches of it
        self._moved_at = 0  # as many were done when schedules moved last: one that comes later moves from there
        self._followed: list[_Followed | None] = []  # by Lightning's configurations; None for one that does not move by step

    @property
    def epoch(self) -> int | None:
        """The number of the epoch that schedules are in; None before the first batch."""
        return self._epoch

    def resize(self, batches: int) -> None:
        """Set how many batches, of all workers, the epoch has that begins or goes on."""
        self._batches = math.ceil(batches / self._workers)

    def advance(self, epoch: int, share: Fraction, accumulation: int, *, before: Fraction = Fraction(0)) -> None:
        """Set the share of the epoch that all have done with the batch at hand; nothing moves yet.

        Args:
            epoch: its number.
            share: from 0 to 1.
            accumulation: batches a step from this batch on.
            before: the share of the epoch that was done already when it began here: after a resume in its middle.
        """
        if self._epoch != epoch:
            self._epoch, self._accumulation, self._moved_at = epoch, accumulation, self._batches_in(before)
            for one in filter(None, self._followed):
                one.began = one.moved - self._moves(self._moved_at, one.frequency)
        if self._accumulation != accumulation:
            self._accumulate(accumulation)
        self._done = self._batches_in(share)

    def _accumulate(self, accumulation: int) -> None:
        """Set the batches a step inside an epoch: schedules move on from where they are."""
        followed = [one for one in self._followed if one is not None]
        stood = [one.began + self._moves(self._done, one.frequency) for one in followed]
        self._accumulation, self._moved_at = accumulation, self._done
        for one, moved in zip(followed, stood, strict=True):
            one.began = moved - self._moves(self._done, one.frequency)

    def move(self, configs: Sequence[Any], *, cut: bool = False) -> None:
        """Move all schedules to where the epoch is, forwards only.

        Args:
            configs: Lightning's, of all schedules that there are now.
            cut: whether the epoch has ended with the batch at hand, which makes it the last one for Lightning.
        """
        self._follow(configs)
        of = self._done if cut else self._batches
        for one in filter(None, self._followed):
            while one.moved < one.began + self._moves(self._done, one.frequency, of=of):
                self._move(one.scheduler)
                one.moved += 1
        self._moved_at = self._done

    def end_epoch(self, epoch: int, share: Fraction, configs: Sequence[Any], *, cut: bool) -> None:
        """Move schedules to where all workers agree that the epoch has ended.

        Args:
            epoch: its number.
            share: of it that is done; less than 1 if it was left early.
            configs, cut: see :meth:`move`.
        """
        self.advance(epoch, share, self._accumulation)
        self.move(configs, cut=cut)

    def state(self, configs: Sequence[Any]) -> dict[str, Any]:
        """How far the schedules have come, for a checkpoint that has their own states too."""
        self._follow(configs)
        return {
            "batches": self._batches,
            "workers": self._workers,
            "accumulation": self._accumulation,
            "epoch": self._epoch,
            "done": self._done,
            "moved": [None if one is None else [one.began, one.moved] for one in self._followed],
        }

    def load(self, state: dict[str, Any], configs: Sequence[Any]) -> None:
        """Restore a saved state: the epoch that it was written in goes on, another one begins where the schedules are.

        Batches stay as many as they were, also on another number of workers: the schedules' own state, such as OneCycleLR's
        ``total_steps``, counts in them.
        """
        self._batches, self._workers = state["batches"], state["workers"]
        self._accumulation, self._epoch = state["accumulation"], state["epoch"]
        self._done = self._moved_at = state["done"]
        self._follow(configs)
        for one, saved in zip(self._followed, state["moved"], strict=False):
            if one is not None and saved is not None:
                one.began, one.moved = saved

    def _follow(self, configs: Sequence[Any]) -> None:
        known = [one for one in self._followed if one is not None]
        self._followed = [self._followed_as(config, known) for config in configs]

    def _followed_as(self, config: Any, known: Sequence[_Followed]) -> _Followed | None:
        if config.interval != "step" or config.reduce_on_plateau:
            return None
        for one in known:
            if one.scheduler is config.scheduler and one.frequency == config.frequency:
                return one
        return _Followed(config.scheduler, config.frequency, began=-self._moves(self._moved_at, config.frequency))

    def _moves(self, done: int, frequency: int, *, of: int | None = None) -> int:
        return moves(done, of=self._batches if of is None else of, accumulation=self._accumulation, frequency=frequency)

    def _batches_in(self, share: Fraction) -> int:
        return math.floor(share * self._batches)
