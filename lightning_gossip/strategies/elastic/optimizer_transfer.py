"""A joiner gets another worker's optimizer states: every tensor in them as it is, whatever its type, and all plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_gossip.algorithm.tensors.flat import host_copy
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.state.optimizer_state import own_part, zeros_for


class Sent(NamedTuple):
    """A tensor of a state, which follows over the group.

    Args:
        shape: of all of it, where a rank has a shard.
        dtype: its type.
        with_parameter: whether it is on the parameter's device; otherwise it is on the host.
        nbytes: of this rank's part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    with_parameter: bool
    nbytes: int


Described = dict[str, Any]  # of one parameter's state: plain values, and a Sent for each tensor, at whatever depth


def copy_optimizers(
    optimizers: Sequence[Optimizer],
    workers: Workers,
    *,
    receives: bool,
    device: torch.device,
    group: Callable[[], dist.ProcessGroup | None],
) -> None:
    """Give joiners rank 0's optimizer states; the next one's if that fails meanwhile. Collective.

    Sparse tensors are left out.

    Args:
        optimizers: of this worker.
        workers: of the job, the joiners among them.
        receives: whether this worker takes them.
        device: where collectives of the group run.
        group: tells the group of the ranks that have the same part of the states; None for the default group.
    """
    parameters = [[parameter for group in optimizer.param_groups for parameter in group["params"]] for optimizer in optimizers]
    mine = None if receives else [_described(one, of) for one, of in zip(optimizers, parameters, strict=True)]
    theirs = workers.gather(mine, kind="the optimizer states of a joiner")[0]
    if not any(theirs):
        return
    if receives:
        for optimizer, states, of in zip(optimizers, theirs, parameters, strict=True):
            optimizer.state.clear()
            for index, described in states.items():
                optimizer.state[of[index]].update(_made(described, of[index]))

    def leaves() -> list[tuple[Tensor | None, Sent]]:
        """This worker's tensors, in the order in which rank 0 sends its own; None for what this one has not got."""
        return [
            leaf
            for number, states in enumerate(theirs)
            for index, described in states.items()
            for leaf in _pairs(optimizers[number].state.get(parameters[number][index], {}), described)
        ]

    tensors = leaves()

    def copy() -> None:
        part = group()  # another one after a failure
        with torch.no_grad():
            for tensor, sent in tensors:
                if sent.nbytes:  # of a shard
                    _broadcast(tensor, sent.nbytes, device, part, receives=receives)

    workers.attempt(copy)


def _described(optimizer: Optimizer, parameters: Sequence[Tensor]) -> dict[int, Described]:
    return {
        index: {name: _description(value, parameter) for name, value in state.items() if not _has_sparse(value)}
        for index, parameter in enumerate(parameters)
        if (state := optimizer.state.get(parameter, {}))
    }


def _description(value: Any, parameter: Tensor) -> Any:
    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Sent(tuple(leaf.shape), leaf.dtype, leaf.device == parameter.device, own_part(leaf).nbytes)

    return tree_map(of, value)


def _has_sparse(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in tree_flatten(value)[0])


def _is_sent(value: Any) -> bool:
    return isinstance(value, Sent)


def _made(described: Described, parameter: Tensor) -> dict[str, Any]:
    """A state of zeros, for what is received."""
    leaves, structure = tree_flatten(described, is_leaf=_is_sent)
    made = [
        zeros_for(parameter, leaf.shape, leaf.dtype, with_parameter=leaf.with_parameter) if isinstance(leaf, Sent) else leaf
        for leaf in leaves
    ]
    state: dict[str, Any] = tree_unflatten(made, structure)
    return state


def _pairs(state: Mapping[str, Any], described: Described) -> list[tuple[Tensor | None, Sent]]:
    found: list[tuple[Tensor | None, Sent]] = []
    for name, value in described.items():
        sent = tree_flatten(value, is_leaf=_is_sent)[0]
        own = tree_flatten(state.get(name))[0]
        fits = len(own) == len(sent)
        for number, leaf in enumerate(sent):
            if isinstance(leaf, Sent):
                tensor = own[number] if fits else None
                if isinstance(tensor, Tensor) and (tuple(tensor.shape), tensor.dtype) == (leaf.shape, leaf.dtype):
                    found.append((own_part(tensor), leaf))
                else:
                    found.append((None, leaf))
    return found


def _broadcast(
    tensor: Tensor | None, nbytes: int, device: torch.device, group: dist.ProcessGroup | None, *, receives: bool
) -> None:
    """Rank 0's bytes, into the tensor on a worker that receives them: no backend knows all types."""
    if tensor is None or receives:
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    else:
        sent = host_copy(tensor).reshape(-1).view(torch.uint8).to(device)
    dist.broadcast(sent, group=group, group_src=0)
    if receives:
        assert tensor is not None
        tensor.copy_(sent.cpu().view(tensor.dtype).view(tensor.shape))
