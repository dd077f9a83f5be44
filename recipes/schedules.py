"""Learning rates as functions of the share of the run, counted in epochs: a linear warm-up, then steps or a cosine.

Each function gives the factor on the learning rate of the global batch. Under :class:`PerStep` it is a LambdaLR's. With shared
work the strategies move such a schedule to the count of all workers' steps, so a fast and a slow worker have the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning.pytorch import Trainer

from lightning_gossip import ConfigurationError

Factor = Callable[[float, float], float]  # of the epochs done, with their fraction, and of where the warm-up begins


def warmup(epoch: float, *, epochs: float, start: float) -> float:
    """The factor of a warm-up: from ``start`` to 1 in a line (Goyal et al. 2017, arXiv 1706.02677, §2.2).

    Args:
        epoch: done so far, with their fraction.
        epochs: how long it takes; 0 for no warm-up.
        start: the factor at epoch 0.
    """
    return 1.0 if epoch >= epochs else start + (1.0 - start) * epoch / epochs


def multistep(epoch: float, *, warmup_epochs: float, start: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """Warm-up, then 1, multiplied by ``gamma`` at each milestone. All in epochs.

    >>> [round(multistep(e, warmup_epochs=5, start=0.25, milestones=(30, 60, 80)), 9) for e in (0, 5, 29.9, 30, 60, 80)]
    [0.25, 1.0, 1.0, 0.1, 0.01, 0.001]
    """
    return warmup(epoch, epochs=warmup_epochs, start=start) * gamma ** sum(epoch >= milestone for milestone in milestones)


def cosine(epoch: float, *, warmup_epochs: float, start: float, epochs: float) -> float:
    """Warm-up, then half a cosine from 1 to 0 at ``epochs`` (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts)."""
    if epoch < warmup_epochs:
        return warmup(epoch, epochs=warmup_epochs, start=start)
    share = min(1.0, (epoch - warmup_epochs) / max(epochs - warmup_epochs, 1e-9))
    return 0.5 * (1.0 + math.cos(math.pi * share))


def steps_and_epochs(trainer: Trainer) -> tuple[float, int]:
    """How many steps each worker makes if all are equally fast, and in how many epochs.

    Raises:
        ConfigurationError: for a run whose length is not given in epochs.
    """
    steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    if trainer.max_steps >= 0 or epochs is None or epochs < 1 or math.isinf(steps):
        raise ConfigurationError(
            f"the schedule counts epochs: it needs max_epochs of at least 1 (given: {epochs}) and no max_steps"
            f" (given: {trainer.max_steps})."
        )
    return steps, epochs


class PerStep:
    """A schedule as a function of steps, for LambdaLR.

    LambdaLR keeps the attributes of such an object in checkpoints. Those that lie in ``__dict__`` here say how long a step was
    when the run began: a run that is resumed on another number of workers goes on in these steps, as its counts do. The
    schedule itself is not kept: it is what the resumed run says.

    Args:
        factor: of the epochs done, and of the factor at which a warm-up begins.
        steps_per_epoch: that each worker makes if all are equally fast.
        start: the factor at which a warm-up begins.
    """

    __slots__ = ("__dict__", "factor")

    def __init__(self, factor: Callable[[float, float], float], steps_per_epoch: float, start: float) -> None:
        self.factor = factor
        self.steps_per_epoch = steps_per_epoch
        self.start = start

    def __call__(self, step: int) -> float:
        """The factor on the learning rate."""
        return self.factor(step / self.steps_per_epoch, self.start)
