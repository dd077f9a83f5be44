"""What the ranks of an island tell each other once a batch, so that they leave their steps at the same one.

A rank hears that it should stop (a signal, another island's request, a timer) at a moment of its own. Left alone it would leave
its mates in the middle of an all-reduce. So each says so after its batch, in a reduction of a few bytes on a group of our own,
which is read one batch later: nobody waits, since mates are in step anyway, and all hear the same.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.transport.peer_errors import peer_errors


class Word(IntFlag):
    """What a rank of an island has to say after a batch."""

    NOTHING = 0
    STOP = 1  # it was told to stop (SIGTERM)
    ASK = 2  # rank 0 was asked for something that all do together
    MEET = 4  # another island waits at a synchronisation point
    LEAVE = 8  # its trainer wants to end the fit


_WORDS = [word for word in Word if word]


class IslandWords:
    """The words of one rank. Mates call the same methods in the same order.

    Args:
        group: of the mates, on host memory; asked for at each use.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup]) -> None:
        self._group = group
        self._said: tuple[dist.Work, Tensor] | None = None

    def say(self, word: Word) -> Word:
        """Say something after a batch; what is still so after the next one is said again.

        Returns:
            What any of them has said after the batch before; nothing after the first one.
        """
        heard = self.hear()
        mine = torch.tensor([int(known in word) for known in _WORDS], dtype=torch.uint8, device="cpu")
        with peer_errors("the island"):
            work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group(), async_op=True)
        assert work is not None
        self._said = work, mine
        return heard

    def hear(self) -> Word:
        """What any of them has said last; nothing if that was heard already. Mates that leave their steps call it."""
        if self._said is None:
            return Word.NOTHING
        (work, said), self._said = self._said, None
        with peer_errors("the island"):
            work.wait()
        heard = Word.NOTHING
        for word, is_said in zip(_WORDS, said.tolist(), strict=True):
            heard |= word if is_said else Word.NOTHING
        return heard

    def forget(self) -> None:
        """Forget what is under way, after a failure: nobody answers any more."""
        self._said = None
