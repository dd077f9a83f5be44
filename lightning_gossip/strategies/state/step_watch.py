"""Whether a batch has moved the model, seen at the parameters: not every step is a call that Lightning hears of.

Optimizers with steps of their own (``first_step`` and ``second_step`` of SAM), raw optimizers, those that
``configure_optimizers`` does not return, updates without an optimizer: all of them change parameters. Three looks, the dearer
one only where the cheaper ones see nothing:

1. Lightning has called the optimizer (``Fit.optimizer_stepped``): nothing is looked at.
2. Where a parameter lies and its version, which every change in place by torch counts: no element is read.
3. The bits. ``p.data.add_(...)`` and fused optimizers count no version. Reads the parameters once, only after batches in which
   the first two saw nothing (accumulation in manual optimization), and where a session is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_gossip.algorithm.tensors.fingerprint import fingerprints


def largest_lr(optimizers: Iterable[Optimizer], *, default: float) -> float:
    """The learning rate that a step counts with: the largest of all groups.

    Args:
        optimizers: that has stepped, or all of the worker where nobody can tell which has.
        default: if no group has a learning rate: Adafactor has None there, and finds it in its step.
    """
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(rate) for rate in rates if rate is not None), default=default)


class StepWatch:
    """Notices whether a worker's optimizers have stepped.

    Args:
        parameters: what an optimizer steps on, as it is now.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._marks: list[tuple[int, int]] = []
        self._bits: list[int] | None = None
        self._reads = False  # the last step was seen in the bits only

    def begin(self) -> None:
        """Begin to watch: a session has been opened."""
        self._reads = True
        self.mark()

    def mark(self, *, heard: bool = False) -> None:
        """Take what has changed until now for seen: it is no step that is still to be noticed.

        Args:
            heard: of the last step through Lightning, so that the bits need no look.
        """
        self._reads = self._reads and not heard
        parameters = self._parameters()
        self._marks = _marks(parameters)
        self._bits = fingerprints(parameters) if self._reads else None

    def has_stepped(self) -> bool:
        """Whether a parameter has changed since the last mark."""
        parameters = self._parameters()
        if _marks(parameters) != self._marks:
            self._reads = False
            return True
        before, self._bits = self._bits, fingerprints(parameters)
        self._reads = before is not None and before != self._bits
        return self._reads


def _marks(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]
