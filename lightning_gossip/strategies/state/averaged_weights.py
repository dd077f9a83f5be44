"""The second model that some callbacks keep, an average of the weights over time: one on all workers when they meet.

Lightning's :class:`WeightAveraging` (and ``EMAWeightAveraging``), its :class:`StochasticWeightAveraging`, and any callback that
has a ``torch.optim.swa_utils.AveragedModel`` in an attribute. Each worker averages its own weights while it trains. When all
meet, the averages become their mean, by the rules of the model itself, before anything is validated or saved; and all workers
decide alike from there on whether the next step is averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.state.one_model import United, compare, unite
from lightning_gossip.strategies.state.shared_tensors import places


@dataclass(frozen=True)
class _Average:
    """One average of one callback.

    Args:
        module: that is averaged.
        counter: of models in it; None before the first.
    """

    callback: Callback
    module: nn.Module
    counter: Tensor | None

    @property
    def count(self) -> int:
        """How many models are in it."""
        return 0 if self.counter is None else int(self.counter)


class AveragedWeights:
    """Averages of the weights that one worker's callbacks keep.

    Args:
        trainer: whose.
        averaged_buffers: patterns of the names of buffers that are averages.
    """

    def __init__(self, trainer: pl.Trainer, averaged_buffers: Sequence[str]) -> None:
        self._trainer = trainer
        self._averaged_buffers = averaged_buffers

    @property
    def are_there(self) -> bool:
        """Whether this worker has any."""
        return next(self._found(), None) is not None

    def unite(self, sync_point: SyncPoint, *, steps: int) -> None:
        """Replace those that all workers have by their means over the workers that have begun to average. Collective.

        Args:
            sync_point: the collectives.
            steps: Lightning's count of optimizer steps, from which all workers go on.
        """
        mine = dict(self._found())
        since = {key: self._steps_since(average.callback) for key, average in mine.items()}
        everyones = sync_point.workers.gather({key: (average.count, since[key]) for key, average in mine.items()})
        for key in sorted(set(everyones[0]).intersection(*everyones[1:])):
            average = mine[key]
            theirs = [worker[key] for worker in everyones]
            sync_point.workers.attempt(partial(self._united, average, sync_point)).write()
            counts = [count for count, _ in theirs if count]
            if counts and average.counter is not None:
                average.counter.fill_(round(sum(counts) / len(counts)))
            if isinstance(average.callback, WeightAveraging):
                average.callback._latest_update_step = steps - theirs[0][1]

    def _united(self, average: _Average, sync_point: SyncPoint) -> United:
        if any(isinstance(parameter, DTensor) for parameter in average.module.parameters()):
            raise ConfigurationError(
                f"{type(average.callback).__name__} keeps a second model, and cannot with one in shards. Leave it out;"
                " checkpoints hold the mean of all islands."
            )
        found = compare(places(average.module, self._averaged_buffers), sync_point)
        return unite(found, sync_point, takes_part=average.count > 0)

    def _steps_since(self, callback: Callback) -> int:
        """Optimizer steps since the last one that was averaged; a callback compares the two."""
        return self._trainer.global_step - callback._latest_update_step if isinstance(callback, WeightAveraging) else 0

    def _found(self) -> Iterator[tuple[str, _Average]]:
        numbers: Counter[str] = Counter()  # callbacks of rank 0 only may stand among them
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            kind = type(callback).__qualname__
            numbers[kind] += 1
            for name, value in vars(callback).items():
                average = _average_in(callback, name, value)
                if average is not None:
                    yield f"{kind} {numbers[kind]} {name}", average


def _average_in(callback: Callback, name: str, value: object) -> _Average | None:
    if isinstance(value, AveragedModel):
        return _Average(callback, value.module, value.n_averaged)
    if isinstance(callback, StochasticWeightAveraging) and name == "_average_model" and isinstance(value, nn.Module):
        return _Average(callback, value, callback.n_averaged)
    return None
