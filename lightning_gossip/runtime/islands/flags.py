"""What the ranks of an island tell each other once a batch, so that they leave their steps at the same one.

A rank hears that it should stop (a signal, another island's request, a timer) at a moment of its own. Left alone it would leave
its mates in the middle of an all-reduce. So each says so after its batch, in a reduction of one byte on a group of our own,
which is read one batch later: nobody waits, since mates are in step anyway, and all hear the same.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.transport.peer_errors import peer_errors


class StepFlag(IntFlag):
    """What a rank of an island may have to say after a batch; one bit each, at most eight."""

    NOTHING = 0
    STOP = 1  # it was told to stop (SIGTERM)
    ASK = 2  # rank 0 was asked for something that all do together
    MEET = 4  # another island waits at a synchronisation point
    LEAVE = 8  # its trainer wants to end the fit


class IslandFlags:
    """The flags of one rank. Mates call the same methods in the same order.

    Args:
        group: of the mates, on host memory; asked for at each use.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup]) -> None:
        self._group = group
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def reduce(self, flags: StepFlag) -> StepFlag:
        """Tell the mates this rank's flags after a batch, without a wait for theirs.

        Args:
            flags: of this batch; what is still so after the next one is told again.

        Returns:
            Those that any of them has set after the batch before; nothing after the first one.
        """
        before = self.take_last()
        flags_of_all = torch.tensor([int(flags)], dtype=torch.uint8, device="cpu")
        with peer_errors("the island"):
            work = dist.all_reduce(flags_of_all, op=dist.ReduceOp.BOR, group=self._group(), async_op=True)
        assert work is not None
        self._under_way = work, flags_of_all
        return before

    def take_last(self) -> StepFlag:
        """Take the flags that any of them has set last; none if they were taken already. Mates call it when they leave."""
        if self._under_way is None:
            return StepFlag.NOTHING
        (work, flags_of_all), self._under_way = self._under_way, None
        with peer_errors("the island"):
            work.wait()
        return StepFlag(int(flags_of_all))

    def forget(self) -> None:
        """Forget what is under way, after a failure: nobody answers any more."""
        self._under_way = None
