"""What else a model holds than the tensors that a session shares, made one on all workers when they meet.

Workers compare the exact bits of each such tensor by a number (:mod:`lightning_gossip.algorithm.tensors.fingerprint`), so that
a frozen base of gigabytes is read once and never sent. What differs is averaged if there is a mean of it, and otherwise taken
from one rank: a queue and its pointer, a unit vector, a codebook and its counts stay what they are together.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor

from lightning_gossip.algorithm.tensors.fingerprint import fingerprints, has_bits
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.algorithm.tensors.flat import FlatModel, LiveTensors
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.state.shared_tensors import Place, SharedModel, digest


@dataclass(frozen=True)
class Differences:
    """What differs between workers, the same on all of them.

    Args:
        means: is averaged.
        follows: is taken from one rank.
        with_gradient: names of parameters that require a gradient on some worker, equal or not.
        flag: whether some worker has raised the flag.
    """

    means: Sequence[Place] = ()
    follows: Sequence[Place] = ()
    with_gradient: Sequence[str] = ()
    flag: bool = False
    tensors: LiveTensors = field(init=False)

    def __post_init__(self) -> None:
        found = [*self.means, *self.follows]
        object.__setattr__(self, "tensors", LiveTensors(lambda: [place.real for place in found]))


def compare(rest: Sequence[Place], sync_point: SyncPoint, *, flag: bool = False) -> Differences:
    """Find what differs between the workers. Collective; sends two numbers a tensor.

    Args:
        rest: of this worker.
        sync_point: the collectives.
        flag: said to all workers with it.
    """
    here = [place for place in rest if has_bits(place.tensor)]
    low, high = sync_point.extremes([len(here), digest([place.name for place in here]), int(flag)])
    if low[:2] != high[:2]:
        here = _common(here, sync_point)
    tensors = [place.real for place in here]
    forms = [digest((tuple(tensor.shape), str(tensor.dtype))) for tensor in tensors]
    bits = [form ^ number for form, number in zip(forms, fingerprints(tensors), strict=True)]
    gradients = [int(not place.is_buffer and place.requires_grad) for place in here]
    least, most = sync_point.extremes([*bits, *forms, *gradients])
    means: list[Place] = []
    follows: list[Place] = []
    with_gradient = []
    for index, place in enumerate(here):
        form = len(here) + index
        if most[form + len(here)]:
            with_gradient.append(place.name)
        if least[index] != most[index]:
            (means if place.has_mean and least[form] == most[form] else follows).append(place)
    return Differences(means, follows, with_gradient, bool(high[2]))


def compare_rest(model: SharedModel, sync_point: SyncPoint, *, parts: SyncPoint, flag: bool = False) -> Rest:
    """Compare what a model's session does not share; the model learns which parameters are trained. Collective.

    Args:
        model: of this worker.
        sync_point: the collectives of all.
        parts: those of the ranks that have the same part of the model.
        flag: said to all workers with it.
    """
    found = [(compare(model.rest(), sync_point, flag=flag), sync_point)]
    in_parts = model.rest_in_parts()
    if in_parts:
        found.append((compare(in_parts, parts), parts))
    for differences, _ in found:
        means = [place.name for place in differences.means if not place.is_buffer]
        model.learn(means, with_gradient=differences.with_gradient)
    return Rest(found)


class Rest:
    """What differs between workers of that which the session does not share.

    Args:
        found: with the collectives that it was compared by: of all workers first.

    Attributes:
        means, follows, with_gradient, flag, tensors: as of :class:`Differences`, of all that was compared.
    """

    def __init__(self, found: Sequence[tuple[Differences, SyncPoint]]) -> None:
        self._found = found
        self.means = [place for differences, _ in found for place in differences.means]
        self.follows = [place for differences, _ in found for place in differences.follows]
        self.with_gradient = [name for differences, _ in found for name in differences.with_gradient]
        self.flag = found[0][0].flag
        self.tensors = LiveTensors(lambda: [tensor for differences, _ in found for tensor in differences.tensors])

    def unite(self, *, counts: bool) -> United:
        """Make one of it. Collective, unless nothing differs; changes nothing yet.

        Args:
            counts: whether the distance of what all have counts on this rank; one of each island's does.
        """
        whole, *parts = [unite(differences, sync_point) for differences, sync_point in self._found]

        def write() -> None:
            for one in (whole, *parts):
                one.write()

        return United((whole.distance if counts else 0.0) + sum(part.distance for part in parts), write)


@dataclass(frozen=True)
class United:
    """What differed, made one, and not in its place yet.

    Args:
        distance: this worker's squared distance to the means; 0 if it does not take part.
        write: puts it there.
    """

    distance: float
    write: Callable[[], None]


def unite(found: Differences, sync_point: SyncPoint, *, takes_part: bool = True) -> United:
    """Make one of what differs. Collective, unless nothing differs; changes nothing yet.

    Args:
        found: by :func:`compare`.
        sync_point: the collectives.
        takes_part: whether this worker's tensors count; if nobody's do, all take those of rank 0. Where a mean is made, those
            that are not finite count only if no others are there.
    """
    if not found.means and not found.follows:
        return United(0.0, lambda: None)
    finite = all(all_finite(place.real) for place in found.means)
    everyones = sync_point.gather_integers([takes_part, finite])
    nobody = not any(theirs for theirs, _ in everyones)
    healthy = any(theirs and theirs_finite for theirs, theirs_finite in everyones)
    source = 0 if nobody else next(rank for rank, (theirs, _) in enumerate(everyones) if theirs)
    distance, writes = 0.0, []
    if found.means and not nobody:
        mean = _average(found.means, sync_point, takes_part=takes_part and bool(finite or not healthy))
        distance = mean.distance
        writes.append(mean.write)
    follows = [*found.follows, *found.means] if nobody else found.follows
    if follows:
        writes.append(_follow(follows, sync_point, source))

    def write() -> None:
        for each in writes:
            each()

    return United(distance, write)


def assign(tensor: Tensor, value: Tensor) -> None:
    """Assign a value to a tensor in place; of another shape too."""
    with torch.no_grad():
        if tensor.shape == value.shape:
            tensor.copy_(value)
        else:
            tensor.data = value.to(tensor.device, tensor.dtype)


def _average(means: Sequence[Place], sync_point: SyncPoint, *, takes_part: bool) -> United:
    tensors = [place.real for place in means]
    flat = FlatModel(tensors)
    distance = sync_point.average_of(flat.read(tensors), takes_part=takes_part)
    return United(distance if takes_part else 0.0, lambda: flat.write(tensors))


def _follow(follows: Sequence[Place], sync_point: SyncPoint, source: int) -> Callable[[], None]:
    def mine() -> Tensor:
        file = io.BytesIO()
        torch.save({place.name: place.tensor.detach().cpu().clone() for place in follows}, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    data = sync_point.copy(mine, source=source)
    theirs = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)

    def write() -> None:
        for place in follows:
            if place.name in theirs:
                assign(place.tensor, theirs[place.name])

    return write


def _common(here: Sequence[Place], sync_point: SyncPoint) -> list[Place]:
    """The places that all workers have, in one order. Collective."""
    everyones = sync_point.workers.gather([place.name for place in here])
    common = set(everyones[0]).intersection(*everyones[1:])
    missing = sorted({name for names in everyones for name in names} - common)
    rank_zero_warn(
        f"Not all workers have {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}: what a module creates while it"
        " trains must be created on all of them. It stays each worker's own, and the model is not one."
    )
    mine = {place.name: place for place in here}
    return [mine[name] for name in everyones[0] if name in common]
