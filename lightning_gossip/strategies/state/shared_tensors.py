"""The tensors of a model that workers share: which, in what order, and how their statistics mix.

| tensor | while workers train | when all meet |
|---|---|---|
| a parameter that is trained | shared: gossiped, averaged | the mean |
| any other parameter | its worker's own | compared; where it differs, the mean, and shared from then on |
| a running mean or variance, and what ``averaged_buffers`` names | shared | the mean |
| a running mean or variance with ``momentum=None`` (of all batches so far) | its worker's own | the mean |
| any other buffer | its worker's own | that of the lowest rank |

A parameter is trained if it requires a gradient now, did so when an earlier session of the fit was opened, or was found to
differ between workers when they met: networks that are frozen in turn, teachers that follow a student without gradients.
docs/decisions/013 says why. What happens when all meet is in :mod:`lightning_gossip.strategies.state.one_model`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_gossip.algorithm.tensors.flat import FlatModel, LiveTensors, host_copy
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.runtime.workers import Workers

_STATISTICS = ("running_mean", "running_var")  # of _NormBase: exponential or cumulative averages over batches


class Place:
    """Where a module keeps a tensor. The tensor is looked up at each use: a training loop may put another one there.

    Args:
        name: in the model.
        owner: the module's parameters or buffers.
        key: in the owner.
        is_buffer: whether it is a buffer.
        is_average: whether it is a buffer of which there is a mean.
        is_cumulative: whether it is the average of all batches so far, in which a merge has no fixed weight.
    """

    def __init__(
        self, name: str, owner: Any, key: str, *, is_buffer: bool, is_average: bool = False, is_cumulative: bool = False
    ) -> None:
        self.name = name
        self.is_buffer = is_buffer
        self.is_average = is_average
        self.is_cumulative = is_cumulative
        self._owner = owner
        self._key = key
        self._last: Tensor = owner[key]

    @property
    def tensor(self) -> Tensor:
        """What is there now; the last one seen, if there is none any more."""
        tensor: Tensor | None = self._owner.get(self._key)
        if tensor is not None:
            self._last = tensor
        return self._last

    @property
    def real(self) -> Tensor:
        """The tensor, a complex one as a real view."""
        tensor = self.tensor
        return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained by gradients now."""
        return self.tensor.requires_grad

    @property
    def has_mean(self) -> bool:
        """Whether averaging leaves a valid value: a floating-point parameter, or a buffer that is an average."""
        return (self.is_average or not self.is_buffer) and (self.tensor.is_floating_point() or self.tensor.is_complex())


def places(model: nn.Module, averaged_buffers: Sequence[str] = ()) -> list[Place]:
    """Where a model keeps its tensors: parameters, then buffers, each once. Without the buffers of metrics.

    Args:
        averaged_buffers: patterns of names; see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.
    """
    return [*_parameter_places(model), *_buffer_places(model, averaged_buffers)]


def _parameter_places(model: nn.Module) -> Iterator[Place]:
    known: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in known:
                known.add(id(tensor))
                yield Place(_name(prefix, key), module._parameters, key, is_buffer=False)


def _buffer_places(model: nn.Module, averaged_buffers: Sequence[str]) -> Iterator[Place]:
    known: set[int] = set()
    metrics: set[int] = set()  # synchronise themselves
    for prefix, module in model.named_modules():
        if isinstance(module, Metric):
            metrics.update(id(part) for part in module.modules())
        if id(module) in metrics:
            continue
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in known:
                known.add(id(tensor))
                name = _name(prefix, key)
                is_statistic = isinstance(module, _NormBase) and key in _STATISTICS
                is_average = is_statistic or any(fnmatchcase(name, pattern) for pattern in averaged_buffers)
                yield Place(
                    name,
                    module._buffers,
                    key,
                    is_buffer=True,
                    is_average=is_average,
                    is_cumulative=is_statistic and module.momentum is None,
                )


def _name(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def check_averaged_buffers(model: nn.Module, averaged_buffers: Sequence[str]) -> None:
    """Refuse patterns that name nothing of which there is a mean.

    Raises:
        ConfigurationError: naming the buffers that there are.
    """
    buffers = list(_buffer_places(model, averaged_buffers))
    floating = [place for place in buffers if place.tensor.is_floating_point() or place.tensor.is_complex()]
    for pattern in averaged_buffers:
        if not any(fnmatchcase(place.name, pattern) for place in floating):
            whole = next((place for place in buffers if fnmatchcase(place.name, pattern)), None)
            why = (
                "no buffer of the model" if whole is None else f"{whole.name} only, whose type {whole.tensor.dtype} has no mean"
            )
            names = ", ".join(place.name for place in floating) or "none"
            raise ConfigurationError(f"averaged_buffers={pattern!r} matches {why}. Its floating-point buffers: {names}.")


def retention(model: nn.Module, names: list[str]) -> list[float]:
    """Per tensor, the share of a merge that one forward pass in training mode keeps; see ``algorithm.replica``."""
    shares: dict[str, float] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.momentum is not None:
            for key in _STATISTICS:
                shares[_name(prefix, key)] = 1.0 - module.momentum
    return [shares.get(name, 1.0) for name in names]


class SharedModel:
    """The model of one fit, and which of its tensors the open session averages.

    Args:
        module: the module that trains.
        averaged_buffers: patterns of the names of buffers that are averages.

    Attributes:
        names, layout, retention: of the tensors of the session; a fingerprint of their shapes, and see :func:`retention`.
        parameters: how many of the tensors, the first ones, are parameters.
        trained: names of the parameters that are known to be trained; all workers know the same.
    """

    def __init__(self, module: nn.Module, averaged_buffers: Sequence[str] = ()) -> None:
        self.module = module
        self.averaged_buffers = tuple(averaged_buffers)
        self.trained: set[str] = set()
        self._with_gradient: set[str] = set()
        self._places: list[Place] = []
        self.names: list[str] = []
        self.layout = 0
        self.retention: list[float] = []
        self.parameters = 0
        self.tensors = LiveTensors(lambda: [place.real for place in self._places])

    def find(self) -> list[Place]:
        """Where the tensors of the model are now."""
        return places(self.module, self.averaged_buffers)

    def fingerprint(self) -> int:
        """What workers have in common whose modules are built alike: :func:`fingerprint` of the whole module."""
        return fingerprint(self.module)

    def open(self) -> SharedModel:
        """Begin a session: find the tensors that are there now and those of them that are shared. Returns itself."""
        found = self.find()
        self.learn([], with_gradient=[place.name for place in found if place.requires_grad and not place.is_buffer])
        parameters = [place for place in found if not place.is_buffer and place.name in self.trained and place.has_mean]
        self._places = parameters + [p for p in found if p.is_buffer and p.has_mean and not p.is_cumulative]
        self.parameters = len(parameters)
        self.names = [place.name for place in self._places]
        self.layout = layout(list(zip(self.names, self.tensors, strict=True)))
        self.retention = retention(self.module, self.names)
        return self

    def learn(self, names: Sequence[str], *, with_gradient: Sequence[str] = ()) -> None:
        """Note which parameters are trained; they are shared from the next session on.

        Args:
            names: of parameters.
            with_gradient: names of those that require a gradient, or did.
        """
        self._with_gradient.update(with_gradient)
        self.trained.update(names, with_gradient)

    def agree(self, workers: Workers) -> None:
        """Learn which parameters any worker knows to be trained, since some have just come. Collective."""
        for names, with_gradient in workers.gather((sorted(self.trained), sorted(self._with_gradient))):
            self.learn(names, with_gradient=with_gradient)

    def rest(self) -> list[Place]:
        """Where the tensors are that the session does not share."""
        known = set(self.names)
        return [place for place in self.find() if place.name not in known]

    def rest_in_parts(self) -> list[Place]:
        """Where the tensors are that the session does not share, and of which each rank of an island has a part of its own.

        They are compared with those of other islands only.
        """
        return []

    @property
    def shared_parameters(self) -> list[Place]:
        """Where the parameters of the session are."""
        return self._places[: self.parameters]

    @property
    def optimized(self) -> list[Tensor]:
        """The parameters that require a gradient, or have done so: what an optimizer steps on."""
        return [place.tensor for place in self._places[: self.parameters] if place.name in self._with_gradient]

    def hand_round(self) -> None:
        """Let the ranks of this worker's island have what it has taken over; nothing where a worker is one rank."""
        return

    def hand_round_all(self) -> None:
        """Let the ranks of this worker's island have all that the session shares, averaged buffers included."""
        return

    def whole(self, tensors: Mapping[str, Tensor], kinds: Sequence[str] = ()) -> dict[str, Tensor]:
        """What an algorithm has for each of the session's parameters, for a checkpoint that any other number of ranks can go on
        from. Collective in an island.

        Args:
            tensors: by kind and name, ``"slow/<name>"``; of this rank's part of the model.
            kinds: that ranks of the island have, though this one may own nothing, and so none of them.

        Returns:
            The same of the whole model, by the parameters' own names.
        """
        return dict(tensors)

    def part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of what :meth:`whole` has made. Collective in an island.

        Args:
            tensors: by kind and name. What is of other parameters or shapes is left out, or, where parameters are parts of one
                vector, its whole kind.
        """
        return dict(tensors)

    def average(self, sync_point: SyncPoint) -> float:
        """Replace the session's tensors by their means over all workers. Collective.

        Returns:
            This worker's squared distance to the mean before.
        """
        flat = FlatModel(self.tensors)
        distance = sync_point.average(flat.read(self.tensors))
        flat.write(self.tensors)
        return distance

    def check_equal(self, layouts: list[int]) -> None:
        """Refuse ranks that share other tensors.

        Args:
            layouts: of all ranks.

        Raises:
            ConfigurationError: on every rank.
        """
        for rank, theirs in enumerate(layouts):
            if theirs != layouts[0]:
                raise ConfigurationError(
                    f"Rank {rank} trains other tensors than rank 0. The parameters with requires_grad, their shapes, types and"
                    " memory formats must be the same on all ranks when an epoch begins."
                )


def by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by kind, and then by name.

    Args:
        tensors: by ``"kind/name"``.

    >>> by_kind({"slow/w": torch.ones(1)})
    {'slow': {'w': tensor([1.])}}
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        found.setdefault(kind, {})[name] = tensor
    return found


def layout(named: Sequence[tuple[str, Tensor]]) -> int:
    """A fingerprint of names, shapes, strides and types, 63 bits."""
    return digest([(name, tuple(t.shape), t.stride(), str(t.dtype)) for name, t in named])


def digest(value: object) -> int:
    """A fingerprint of plain values, 63 bits."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


def fingerprint(model: nn.Module) -> int:
    """Fingerprint of the names, shapes, strides and types of all parameters and buffers."""
    return layout(list(_parameters_and_buffers(model)))


def start_equal(model: nn.Module, workers: Workers, *, in_host_memory: bool = False) -> None:
    """Copy rank 0's parameters and buffers, frozen and integer ones too, to all ranks. Collective.

    Args:
        model: of this rank.
        workers: of the job.
        in_host_memory: whether their group works on nothing else; where it has several backends tensors stay where they are.

    Raises:
        ConfigurationError: if the model is not built of the same tensors everywhere.
    """
    check_same_tensors(model, workers)
    everything = list(_parameters_and_buffers(model))

    @torch.no_grad()
    def copy() -> None:
        for _, tensor in everything:
            contiguous = host_copy(tensor) if in_host_memory else tensor.detach().contiguous()
            sent = torch.view_as_real(contiguous) if contiguous.is_complex() else contiguous
            dist.broadcast(sent, group=workers.group, group_src=0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)

    workers.attempt(copy)


def check_same_tensors(model: nn.Module, workers: Workers) -> None:
    """Refuse models that are not built of the same tensors on all ranks, or not built yet. Collective.

    Raises:
        ConfigurationError: naming what differs.
    """
    mine = [
        (name, None if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in _parameters_and_buffers(model)
    ]
    everyones = workers.gather(mine, kind="the names of the model's tensors")
    lazy = sorted({name for theirs in everyones for name, shape, _ in theirs if shape is None})
    if lazy:
        raise ConfigurationError(
            f"{', '.join(lazy[:5])} of the model have no shape yet: lazy modules get it in their first forward pass. Make one"
            " in setup(), with a batch of zeros."
        )
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            differing = sorted({name for name, *_ in set(theirs) ^ set(everyones[0])})
            what = ", ".join(differing[:5]) or "the order of its tensors"
            raise ConfigurationError(
                f"The model of rank {rank} differs from that of rank 0 in {what}."
                " All ranks must build the same model: do not let its shape depend on the rank or on unseeded randomness."
            )


def _parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
