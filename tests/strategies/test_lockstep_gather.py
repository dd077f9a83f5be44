"""Gathers in a training step under qsgd, whose workers make their steps together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_gossip import ConfigurationError, PeerError
from lightning_gossip.strategies.fit.lockstep_gather import Turn, next_turn
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

ARRIVED, GRADIENT = Turn(False), Turn(True)


def test_what_comes_next_is_what_those_in_a_step_do() -> None:
    assert next_turn([GRADIENT, ARRIVED, GRADIENT]) == GRADIENT
    assert next_turn([ARRIVED, Turn(True, 64)]) == Turn(True, 64)
    assert next_turn([ARRIVED, ARRIVED]) is None


def test_workers_that_do_different_things_in_a_step_are_told_so() -> None:
    with pytest.raises(ConfigurationError, match="rank 0 gathers 64 bytes, rank 2 is done with its backward pass"):
        next_turn([Turn(True, 64), ARRIVED, GRADIENT])


class Stream(IterableDataset[Any]):
    """Rank 0 has 8 batches, the others 3."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(8 if os.environ["RANK"] == "0" else 3):
            yield torch.ones(8), torch.tensor(0), torch.tensor(0)


class Gathers(Net):
    """Gathers from one batch on, once with gradients and once without."""

    def __init__(self, begin: int) -> None:
        super().__init__(network=nn.Linear(8, 2))
        self.begin = begin
        self.gathered: list[list[float]] = []
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= self.begin:
            assert self.all_gather(torch.tensor(self.global_rank)).tolist() == list(range(3 if batch_idx < 3 else 1))
            mine = torch.tensor(float(self.global_rank), requires_grad=True)
            everyones = self.all_gather(mine, sync_grads=True)
            self.gathered.append(everyones.tolist())
            (gradient,) = torch.autograd.grad(everyones.sum() * (self.global_rank + 1), mine)
            self.gradients.append(float(gradient))
        return loss


def _gathers(begin: int) -> Any:
    model = Gathers(begin)
    trainer(strategy="qsgd", max_epochs=2).fit(model, DataLoader(Stream(), 1))
    return model.gathered, model.gradients, flat(model).tolist()


@pytest.mark.processes
@pytest.mark.parametrize("begin", [0, 2, 5])
def test_a_gather_is_of_those_that_make_the_step_and_gradients_go_back_to_all(begin: int) -> None:
    """From the first step on, in the middle, and when two of three have already arrived at the end of the epoch."""
    results = launch(_gathers, begin, workers=3)
    for rank, (gathered, gradients, model) in enumerate(results):
        together = max(0, 3 - begin)
        alone = 8 - max(3, begin) if rank == 0 else 0
        assert gathered == ([[0.0, 1.0, 2.0]] * together + [[0.0]] * alone) * 2
        assert gradients == ([6.0] * together + [1.0] * alone) * 2  # 1 + 2 + 3: the sum over all workers' losses
        assert model == results[0][2]


class GathersOnOneRank(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            self.all_gather(torch.ones(3))
        return super().training_step(batch, batch_idx)


def _gathers_on_one_rank() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(strategy="qsgd").fit(GathersOnOneRank(), loader())
    return str(caught.value)


@pytest.mark.processes
def test_a_gather_that_one_rank_makes_alone_is_an_error_and_no_hang() -> None:
    for said in launch(_gathers_on_one_rank):
        assert "Some workers call all_gather in this training step and some do not" in said


class GathersUnderOthers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(torch.ones(3))
        return super().training_step(batch, batch_idx)


def _refused(strategy: str) -> str:
    with pytest.raises((ConfigurationError, PeerError)) as caught:  # one may hear first that the other has ended
        trainer(strategy=strategy).fit(GathersUnderOthers(), loader())
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "why"),
    [("apsgd", "each of them is at a step of its own"), ("dpsgd", "one that has ended its batches makes no more steps")],
)
def test_elsewhere_it_is_refused_with_the_reason(strategy: str, why: str) -> None:
    said = [text for text in launch(_refused, strategy) if "all_gather in a training step" in text]
    assert said
    for text in said:
        assert why in text
        assert "strategy='ddp'" in text
