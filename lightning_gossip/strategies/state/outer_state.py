"""The slow weights and the outer momentum of a worker, from one session to the next and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_gossip.algorithm.outer import OuterState
from lightning_gossip.strategies.state.shared_tensors import SharedModel


def outer_state_of(model: SharedModel, before: OuterState | None, restored: Mapping[str, Tensor]) -> OuterState:
    """The outer state of the parameters that a session shares; of those that are new to it, it begins with their values.

    Args:
        model: just opened.
        before: of the session before; it is returned if it fits.
        restored: of a checkpoint, if this is the first session.
    """
    parameters = list(model.tensors[: model.parameters])
    names = model.names[: model.parameters]
    if before is not None and before.names == names and before.fits(parameters):
        return before
    state = OuterState(names, parameters)
    state.take(restored if before is None else before.state_dict())
    return state
