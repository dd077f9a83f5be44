"""Few exchanges: a dense start, then rounds of local steps with an outer step at the end of each.

| part of the run | exchanges of a worker in a step | at a step boundary |
|---|---|---|
| the first ``dense_share`` | 1 | push and pull |
| then, without ``outer`` | ``exchanges_per_step`` | push and pull |
| then, with it | ``exchanges_per_step`` | push and pull; after every ``local_steps`` own steps an outer step, published |
| with ``a2cid2``, always | ``exchanges_per_step`` | mix with the second copy; push and pull |

The dense start takes the models out of the neighbourhood of their initial values together; the first round begins with its end.
Reads no clock; a driver does what needs the published model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_gossip.algorithm.adpsgd.a2cid2 import SecondCopy, acceleration
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.adpsgd.replica import Follower
from lightning_gossip.algorithm.slow_weights import OuterState, SlowWeights, outer_state
from lightning_gossip.algorithm.topology.topology import Topology


class LocalSteps:
    """One worker's rounds of local steps during one fit.

    Args:
        options: of the algorithm.

    Attributes:
        is_dense: whether this is the dense start.
    """

    def __init__(self, options: GossipOptions) -> None:
        self._options = options
        self._slow: SlowWeights | None = None
        self._restored: dict[str, Tensor] = {}
        self._restored_steps = 0
        self._begins_anew = False
        self._second: SecondCopy | None = None
        self._is_finer = False  # whether φ has a wider type than x
        self.is_dense = options.dense_share > 0.0

    @property
    def state(self) -> OuterState | None:
        """φ and v; None before the first session, in the dense start, and without outer steps."""
        return None if self._slow is None or self.is_dense else self._slow.state

    def rate(self, exchanges_per_step: float) -> float:
        """Exchanges that this worker takes part in per step of its neighbourhood, now.

        Args:
            exchanges_per_step: after the dense start; with 0 there is none in it either.
        """
        return max(1.0, exchanges_per_step) if self.is_dense and exchanges_per_step > 0.0 else exchanges_per_step

    def open(self, names: Sequence[str], x: Sequence[Tensor], topology: Topology) -> None:
        """Begin a session with these parameters, before anything is published.

        Args:
            names, x: of the parameters.
            topology: of the session.
        """
        if self._options.a2cid2:
            constants = acceleration(topology, self._options.exchanges_per_step)
            if self._second is None or not self._second.fits(x):
                self._second = SecondCopy(x, constants)
            self._second.constants = constants
            if self._begins_anew:
                self._second.begin()
            self._begins_anew = False
            return
        outer, local_steps = self._options.outer, self._options.local_steps
        if outer is None or local_steps is None:
            return
        if self._slow is None:
            self._slow = SlowWeights(outer, local_steps, outer_state(names, x, before=None, restored=self._restored))
            self._slow.steps = self._restored_steps % local_steps
            self._restored = {}
        else:
            self._slow.state = outer_state(names, x, before=self._slow.state, restored={})
        self._is_finer = any(slow.dtype != tensor.dtype for slow, tensor in zip(self._slow.state.slow_views, x, strict=True))
        self._has_begun_anew(x)

    @property
    def followers(self) -> list[Follower]:
        """What takes over merges when x does; for the published model, after :meth:`open` and each :meth:`step`."""
        if self._second is not None:
            return self._second.followers
        outer = self._options.outer
        if self._slow is None or self.is_dense or outer is None or not outer.follows_merges or self._is_finer:
            return []
        return [Follower(self._slow.state.slow_views, 1.0)]

    @contextmanager
    def merging(self, x: Sequence[Tensor]) -> Iterator[None]:
        """Inside, x takes over merges, and nothing else; the followers do so by themselves."""
        if self._slow is None or self.is_dense or not self._is_finer:
            yield
            return
        with self._slow.merging(x):  # what x makes of them, which rounds
            yield

    @contextmanager
    def adopting(self, x: Sequence[Tensor]) -> Iterator[None]:
        """Inside, x becomes the mean of all."""
        if self._second is not None:
            yield
            self._second.begin()
        elif self._slow is None or self.is_dense:
            yield
        else:
            with self._slow.merging(x):
                yield

    def step(
        self, x: Sequence[Tensor], *, progress: float | None, push_pull: Callable[[], Any], publish: Callable[[], Any]
    ) -> None:
        """Follow a step of this worker's optimizers: push and pull, and perhaps an outer step.

        Args:
            x: the parameters.
            progress: share of the run's steps done, in [0, 1]; None if the run's length is unknown.
            push_pull: publishes the local update and takes over the merges, as the followers do.
            publish: the same, where there was no local update but an outer step.
        """
        if self._second is not None:
            self._second.mix(x)
            push_pull()
            if self._begins_anew:
                self._second.begin()
            self._begins_anew = False
            return
        if self.is_dense:
            push_pull()
            self.is_dense = progress is not None and progress < self._options.dense_share
            if not self.is_dense and self._slow is not None:
                self._slow.begin(x)
            self._begins_anew = False
            return
        with self.merging(x):
            push_pull()
        if self._slow is None or self._has_begun_anew(x):
            return
        if self._slow.step(x):
            with self.merging(x):
                publish()
            self._has_begun_anew(x)

    def begin_anew(self) -> None:
        """Others have given this worker its model: a round begins, when the step under way ends or the next session begins."""
        self._begins_anew = True

    def _has_begun_anew(self, x: Sequence[Tensor]) -> bool:
        if self._begins_anew and self._slow is not None:
            self._slow.begin(x)
        anew, self._begins_anew = self._begins_anew, False
        return anew

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; φ and v are in ``state``."""
        return {"is_dense": self.is_dense, "steps": 0 if self._slow is None else self._slow.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; before the first session."""
        self.is_dense, self._restored_steps = state["is_dense"], state["steps"]

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with this φ and v; before the first session, and before :meth:`load_state_dict`."""
        self._restored = dict(tensors)
        self.is_dense = self.is_dense and not tensors  # if nothing else is known of it
