"""The tensors of a model that workers share: which, in what order, and how their statistics mix."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_gossip.algorithm.flat import FlatModel
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.rendezvous import Rendezvous, gather, together


def shared_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What is averaged: parameters that require a gradient, and floating-point buffers. Tied weights appear once.

    Frozen parameters do not change, integer buffers are counts, and buffers with infinities are constants (attention masks): of
    none of them there is a mean. A complex tensor is given as a real view.
    """
    statistics = {id(buffer) for module in model.modules() if isinstance(module, _NormBase) for buffer in module.buffers()}
    named: list[tuple[str, Tensor]] = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    named += [(name, buffer) for name, buffer in model.named_buffers() if _is_averaged(buffer, id(buffer) in statistics)]
    return [(name, torch.view_as_real(t.detach()) if t.is_complex() else t) for name, t in named]


def retention(model: nn.Module, names: list[str]) -> list[float]:
    """Per tensor, the share of a merge that one forward pass in training mode keeps; see ``algorithm.replica``."""
    shares: dict[str, float] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            # momentum=None is a cumulative average, in which a merge has no fixed weight: take it over at the rendezvous only
            share = 0.0 if module.momentum is None else 1.0 - module.momentum
            for name in ("running_mean", "running_var"):
                shares[f"{prefix}.{name}" if prefix else name] = share
    return [shares.get(name, 1.0) for name in names]


class SharedModel:
    """The tensors of a model that an open session averages.

    Args:
        model: the module that trains.
    """

    def __init__(self, model: nn.Module) -> None:
        named = shared_tensors(model)
        self.module = model
        self.names = [name for name, _ in named]
        self.tensors: list[Tensor] = [tensor for _, tensor in named]
        self.parameters = sum(parameter.requires_grad for parameter in model.parameters())  # how many, the first ones
        self.layout = layout(named)
        self.retention = retention(model, self.names)

    def average(self, meeting: Rendezvous) -> float:
        """Replace the tensors by their means over all workers. Collective.

        Returns:
            This worker's squared distance to the mean before.
        """
        flat = FlatModel(self.tensors)
        distance = meeting.average(flat.read(self.tensors))
        flat.write(self.tensors)
        return distance + self.average_unfrozen(meeting)

    def average_unfrozen(self, meeting: Rendezvous) -> float:
        """Average what has begun to require a gradient since the session was opened. Collective.

        Returns:
            This worker's squared distance to the mean of these tensors before.

        Raises:
            ConfigurationError: if they differ between ranks.
        """
        known = set(self.names)
        unfrozen = [tensor for name, tensor in shared_tensors(self.module) if name not in known]
        if not meeting.all_equal([len(unfrozen), sum(tensor.numel() for tensor in unfrozen)]):
            raise ConfigurationError(
                "Parameters were unfrozen in the middle of an epoch on some ranks only. Change requires_grad at the same point"
                " on all of them, best in on_train_epoch_start."
            )
        if not unfrozen:
            return 0.0
        flat = FlatModel(unfrozen)
        distance = together(lambda: meeting.average(flat.read(unfrozen)))
        flat.write(unfrozen)
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


def layout(named: list[tuple[str, Tensor]]) -> int:
    """A fingerprint of names, shapes, strides and types, 63 bits."""
    text = repr([(name, tuple(t.shape), t.stride(), str(t.dtype)) for name, t in named])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fingerprint(model: nn.Module) -> int:
    """Of the names, shapes, strides and types of all parameters and buffers."""
    return layout([(name, tensor) for name, tensor in _parameters_and_buffers(model)])


def start_equal(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers, frozen and integer ones too, to all ranks. Collective.

    Raises:
        ConfigurationError: if the model is not built of the same tensors everywhere.
    """
    everything = list(_parameters_and_buffers(model))
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in everything]
    everyones = gather(mine, kind="the names of the model's tensors")
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            differing = sorted({name for name, *_ in set(theirs) ^ set(everyones[0])})
            what = ", ".join(differing[:5]) or "the order of its tensors"
            raise ConfigurationError(
                f"The model of rank {rank} differs from that of rank 0 in {what}."
                " All ranks must build the same model: do not let its shape depend on the rank or on unseeded randomness."
            )

    @torch.no_grad()
    def copy() -> None:
        for _, tensor in everything:
            contiguous = tensor.detach().contiguous()
            dist.broadcast(torch.view_as_real(contiguous) if contiguous.is_complex() else contiguous, src=0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)

    together(copy)


def _is_averaged(buffer: Tensor, is_statistic: bool) -> bool:
    # a running statistic that is not finite is the mark of a broken model, and must be seen
    return (buffer.is_floating_point() or buffer.is_complex()) and (is_statistic or not bool(torch.isinf(buffer).any()))


def _parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
