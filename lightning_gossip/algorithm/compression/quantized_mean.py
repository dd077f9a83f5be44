r"""QSGD's step: each worker replaces its gradient by the mean of everybody's quantized one (arXiv 1610.02132, algorithm 1).

    g ← (1/|A|) Σ_{i ∈ A} Q(g_i)              A the workers that make this step

A message is Q(g_i) and one byte in which its sender says of itself what :class:`Status` lists. Everybody gets everybody's, in
the order of the ranks, so the mean has the same bits on all workers. A worker that has arrived at a synchronisation point goes
on sending messages, which do not count, until all have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from lightning_gossip.algorithm.compression.qsgd import Quantizer
from lightning_gossip.errors import ConfigurationError


class Status(IntFlag):
    """What a worker says of itself with its gradient."""

    IN_STEP = 0  # nothing but that it makes this step
    ARRIVED = 1  # it makes no more steps
    CALLING = 2  # it asks for a synchronisation
    THAWED = 4  # it has a gradient for a parameter that was frozen when the session began
    PARTIAL = 8  # some of its parameters have no gradient
    ANNOUNCES = 16  # it has no gradient yet, and from here on everything is announced


@dataclass(frozen=True)
class Said:
    """What all workers have said of themselves, by rank; everybody draws the same conclusions from it."""

    statuses: tuple[Status, ...]

    def any(self, status: Status) -> bool:
        """Whether any worker says yes."""
        return any(theirs & status for theirs in self.statuses)

    @property
    def ended(self) -> bool:
        """Whether no worker makes steps any more."""
        return all(theirs & Status.ARRIVED for theirs in self.statuses)

    @property
    def announces(self) -> bool:
        """Whether those in the step have no gradient yet.

        Raises:
            ConfigurationError: if some have and some have not.
        """
        begin = {bool(theirs & Status.ANNOUNCES) for theirs in self.statuses if not theirs & Status.ARRIVED}
        if len(begin) > 1:
            raise ConfigurationError(
                "Some workers call all_gather in this training step and some do not. Every rank has to gather equally often."
            )
        return begin == {True}


class QuantizedMean:
    """One worker's part of the mean; the messages are moved by somebody else.

    Args:
        quantizer: Q, the same on all workers.
        seed: of the rounding.
        rank: of this worker, whose rounding is independent of the others'.
        device: of the gradients.

    Attributes:
        generator: of the rounding; its state goes into checkpoints.

    >>> workers = [QuantizedMean(Quantizer(bits=8), seed=0, rank=rank) for rank in range(2)]
    >>> messages = [worker.message(torch.ones(3) * rank) for rank, worker in enumerate(workers)]
    >>> mean = torch.empty(3)
    >>> workers[0].mean(messages, out=mean).ended, mean.tolist()
    (False, [0.5, 0.5, 0.5])
    """

    def __init__(self, quantizer: Quantizer, *, seed: int, rank: int, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed((seed + 1_000_003 * rank) % 2**63)
        self._quantizer = quantizer

    def message(self, gradient: Tensor, status: Status = Status.IN_STEP) -> Tensor:
        """Q(g_i) and the status, uint8, of :func:`message_bytes`.

        Args:
            gradient: g_i, shape (d,); of a worker that has arrived anything of that shape.
            status: of this worker.
        """
        payload = self._quantizer.encode(gradient, self.generator)
        return torch.cat([payload, payload.new_tensor([int(status)])])

    def mean(self, messages: Sequence[Tensor], out: Tensor) -> Said:
        """Leave the mean of those that make the step in ``out``, shape (d,); 0 if nobody makes it.

        Args:
            messages: everybody's, by rank.
            out: of the gradients' type.
        """
        said = Said(tuple(Status(int(message[-1])) for message in messages))
        out.zero_()
        counted = [message for message, theirs in zip(messages, said.statuses, strict=True) if not theirs & Status.ARRIVED]
        for message in counted:
            self._quantizer.decode_add(message[:-1], out)
        out.div_(max(1, len(counted)))
        return said


def message_bytes(quantizer: Quantizer, numel: int) -> int:
    """Bytes of one worker's message about so many elements."""
    return quantizer.nbytes(numel) + 1
