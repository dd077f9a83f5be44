"""What is done about a model that is not finite where all workers are together, and how it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor

from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.errors import NonFiniteError, PeerError
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite
from lightning_gossip.runtime.sync_point import SyncPoint

log = logging.getLogger(__name__)


def error_of(rank: int, names: Sequence[str], tensors: Sequence[Tensor]) -> NonFiniteError:
    """What a worker ends with whose model is not finite.

    Args:
        rank: the worker's.
        names: of the tensors.
        tensors: of the model.
    """
    where = "it was when it was exchanged"
    for name, tensor in zip(names, tensors, strict=True):
        if not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            where = f"{bad} of the {tensor.numel()} elements of {name} are NaN or infinite"
            break
    return NonFiniteError(
        f"The model of rank {rank} is not finite: {where}. The other workers have not taken it in. Look for a learning rate"
        " that is too high, a loss that divides by zero or overflows, or a bad sample (Trainer(detect_anomaly=True) finds the"
        " operation); or pass on_nonfinite='adopt', and such a worker goes on from another one's model."
    )


def mean_of_healthy(
    sync_point: SyncPoint,
    replica: PublishedModel,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    on_nonfinite: OnNonFinite,
    rank: int,
    *,
    unit: int,
) -> tuple[float, bool]:
    """Average again, without the models that are not finite, when the mean of all was found not to be. Collective.

    Args:
        sync_point: the collectives.
        replica: whose published model is that mean; left as the mean of the healthy ones.
        names, tensors: x, still this worker's own.
        on_nonfinite: the strategy's option.
        rank: of this worker.
        unit: of which its model is, with those of other ranks: its island's number. It is finite if all of them are.

    Returns:
        This worker's squared distance to the new mean (0 for one whose model was not finite), and whether it was finite.

    Raises:
        NonFiniteError: under ``"raise"`` on a worker whose model is not finite; on all if none is.
        PeerError: under ``"raise"`` on the others.
    """

    def average() -> float:
        replica.push_pull(tensors, forward_passes=0)  # y ← x
        return sync_point.average_of(replica.settle(), takes_part=finite)

    replica.push_pull(tensors, forward_passes=0)
    own_finite = all_finite(replica.settle())
    everyones = sync_point.workers.gather((rank, unit, own_finite), kind="who is finite")
    ill = [theirs for theirs, _, healthy in everyones if not healthy]
    ill_units = {theirs for _, theirs, healthy in everyones if not healthy}
    finite = unit not in ill_units
    if not ill:  # of finite models the sum has overflowed, or the worker that was ill has failed meanwhile
        return sync_point.workers.attempt(average), True
    if ill_units == {theirs for _, theirs, _ in everyones} or (on_nonfinite == "raise" and not own_finite):
        raise error_of(rank, names, tensors)
    if on_nonfinite == "raise":
        raise PeerError(
            f"The model of rank {', '.join(map(str, ill))} is not finite, so there is no mean, and all end; its own log says"
            " more. With on_nonfinite='adopt' it would go on from the mean of the others.",
            rank=ill[0],
            phase="rendezvous",
        )
    if not finite:
        log.warning("rank %d: its model, or its island's, is not finite; it goes on from the mean of the others", rank)
    distance = sync_point.workers.attempt(average)
    return (distance if finite else 0.0), finite


def warn_of_mean(tensors: Sequence[Tensor]) -> None:
    """Say so if the mean that all workers have just got is not finite."""
    if not all(all_finite(tensor) for tensor in tensors):
        rank_zero_warn(
            "The mean of all workers' models is not finite: some worker's model holds NaN or infinity, and now all do. Look"
            " for a learning rate that is too high or a bad sample; EarlyStopping(check_finite=True) ends such a run."
        )
