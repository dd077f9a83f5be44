"""The mean of optimizers' states over several workers, for a checkpoint: in host memory, tensor by tensor.

| in the state of a parameter | in the checkpoint |
|---|---|
| dense floating-point or complex tensors | their mean over the workers that have them |
| numbers, and integer tensors of one element: counters | those of the lowest rank that has them |
| anything else in tensors (8-bit codes, sparse or nested ones) | the whole state of the lowest rank that has it |

The last, since the rest of such a state means something beside these tensors only: a scale belongs to its codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_gossip.strategies.state.optimizer_state import is_averaged

P = TypeVar("P", int, str)  # a parameter: its number or its name


class Averaged(NamedTuple):
    """A tensor of which there is a mean.

    Args:
        shape: of this rank's part of it.
        dtype: of the sum.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


Described = Mapping[P, "dict[str, Any] | None"]


def described(states: Mapping[P, Mapping[str, Any]], *, part: Callable[[Tensor], Tensor]) -> dict[P, dict[str, Any] | None]:
    """What a worker tells the others of its states: by parameter and name an :class:`Averaged`, or a value as it is; None for a
    parameter whose state has no mean.

    Args:
        states: by parameter and name.
        part: this rank's of a tensor.
    """
    return {parameter: _described(state, part) if _has_mean(state) else None for parameter, state in states.items()}


def _described(state: Mapping[str, Any], part: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        name: Averaged(tuple(part(value).shape), torch.promote_types(value.dtype, torch.float32))
        if is_averaged(value)
        else _on_host(value, part)
        for name, value in state.items()
    }


def _has_mean(state: Mapping[str, Any]) -> bool:
    others = tree_leaves({name: value for name, value in state.items() if not is_averaged(value)})
    return not any(isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.numel() > 1) for leaf in others)


def means(
    states: Mapping[P, Mapping[str, Any]],
    everyones: Sequence[Described[P]],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    part: Callable[[Tensor], Tensor],
) -> Iterator[tuple[P, str, Any]]:
    """What a checkpoint says of the states: of each parameter each value, one after the other, tensors in host memory.

    Collective in the group: every worker takes all of them. Of integer tensors and what is not dense the lowest rank gets its
    own, wherever they are.

    Args:
        states: of this worker, by parameter and name.
        everyones: what the workers of the group have told of theirs, by rank.
        group: of the workers.
        device: where it works.
        part: this rank's of a tensor.
    """
    rank = dist.get_rank() if group is None else group.rank()
    for parameter in sorted({parameter for told in everyones for parameter in told}):
        holders = [number for number, told in enumerate(everyones) if parameter in told]
        own = states.get(parameter, {})
        found = [everyones[number][parameter] for number in holders]
        if any(told is None for told in found):
            whole = _whole(own, holders[0], rank=rank, group=group, device=device, part=part)
            yield from ((parameter, name, value) for name, value in whole)
            continue
        for name in sorted({name for told in found if told is not None for name in told}):
            has = [told[name] for told in found if told is not None and name in told]
            of = [one for one in has if isinstance(one, Averaged)]
            mine = own.get(name)
            if not of:
                yield parameter, name, own.get(name, has[0])
            elif isinstance(mine, Tensor) and is_averaged(mine):
                yield parameter, name, _mean(part(mine), of, group, device).to(mine.dtype)
            else:
                yield parameter, name, _mean(None, of, group, device)


def _mean(own: Tensor | None, of: Sequence[Averaged], group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    shape, dtype = of[0]
    total = torch.zeros(shape, dtype=dtype, device=device)
    if own is not None:
        total.copy_(own)
    if total.numel():  # of a shard
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=group)
    total /= len(of)
    return total.cpu()


def _whole(
    own: Mapping[str, Any],
    holder: int,
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    part: Callable[[Tensor], Tensor],
) -> Iterator[tuple[str, Any]]:
    """The state of the lowest rank, as it is there; where that has none, of the next one, for all."""
    if holder == 0:
        yield from own.items()
        return
    sent: list[Any] = [_on_host(dict(own), part) if rank == holder else None]
    dist.broadcast_object_list(sent, group=group, group_src=holder, device=device)
    yield from sent[0].items()


def _on_host(value: Any, part: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(lambda leaf: part(leaf).detach().cpu() if isinstance(leaf, Tensor) else leaf, value)
