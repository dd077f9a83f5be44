"""Gathers of the user's own in the middle of a step, where all workers that make steps make them together.

A worker that has ended its batches, or was asked to come, makes no more steps and knows of no gather; it would leave the others
waiting. So once some step has gathered, every collective of the algorithm is announced, and whoever has arrived takes part with
nothing. Until then nothing is announced: a run that never gathers pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.collectives import Collectives


@dataclass(frozen=True)
class Turn:
    """What one worker does next.

    Args:
        is_in_batch: whether it is in a training step; otherwise it has arrived.
        gathers: bytes that it gathers for the user; 0 for the algorithm's own collective.
    """

    is_in_batch: bool
    gathers: int = 0


def next_turn(turns: Sequence[Turn]) -> Turn | None:
    """What all take part in now; None if nobody makes steps any more. Pure: the same on all workers.

    Raises:
        ConfigurationError: if those in a step do different things.
    """
    sizes = {turn.gathers for turn in turns if turn.is_in_batch}
    if len(sizes) > 1:
        places = ", ".join(
            f"rank {rank} {f'gathers {turn.gathers} bytes' if turn.gathers else 'is done with its backward pass'}"
            for rank, turn in enumerate(turns)
            if turn.is_in_batch
        )
        raise ConfigurationError(
            f"all_gather in a training step differs over the workers: {places}. Every rank has to gather equally often in a"
            " step, tensors of the same shape: use drop_last=True if the last batches differ in size."
        )
    return Turn(True, sizes.pop()) if sizes else None


def announce(collectives: Collectives, turn: Turn, device: torch.device) -> list[Turn]:
    """Tell all workers this one's turn, and learn theirs, by rank. Collective."""
    mine = torch.tensor([turn.is_in_batch, turn.gathers], dtype=torch.int64, device=device).view(torch.uint8)
    rows = [theirs.view(torch.int64).tolist() for theirs in collectives.gather_bytes(mine)]
    return [Turn(bool(is_in_batch), gathers) for is_in_batch, gathers in rows]


class Gatherer:
    """How an algorithm gathers in a step."""

    def gather_in_batch(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The tensors of those that make this step, stacked by rank, and this worker's place among them. Collective."""
        raise NotImplementedError


class GatherWithGradients(torch.autograd.Function):
    """Gathers forwards; backwards each worker gets the sum of all workers' gradients of its own tensor, as under DDP."""

    @staticmethod
    def forward(ctx: Any, gatherer: Gatherer, tensor: Tensor) -> Tensor:
        everyones, ctx.place = gatherer.gather_in_batch(tensor)
        ctx.gatherer = gatherer
        return everyones

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        everyones, _ = ctx.gatherer.gather_in_batch(gradients[0])
        return None, everyones.sum(0)[ctx.place]
