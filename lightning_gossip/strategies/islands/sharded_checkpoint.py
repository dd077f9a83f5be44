"""Checkpoints of a sharded model: the means over islands, written by the ranks of one island in the formats of Lightning's own
ModelParallelStrategy.

The default process group is the island's, so torch's distributed checkpoint sees one model. On a group of all ranks it would
take each tensor from some island or other, and make a mixture of models without a word.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import (
    _distributed_checkpoint_load,
    _distributed_checkpoint_save,
    _is_sharded_checkpoint,
)
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.strategies import model_parallel
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.islands.sharded_model import as_whole, local, on_host_as
from lightning_gossip.strategies.islands.sharding import reshard, sharded_modules
from lightning_gossip.strategies.state.checkpoint_contents import KEY
from lightning_gossip.strategies.state.optimizer_means import described, means
from lightning_gossip.strategies.state.optimizer_state import is_averaged

_HOST = torch.device("cpu")


def write_shards(checkpoint: dict[str, Any], path: Path, *, is_first: bool) -> None:
    """Write a distributed checkpoint, a folder, as a whole or not at all. Collective in the island that writes.

    Args:
        checkpoint: Lightning's, with this rank's shards in it.
        path: of the folder; what was there is replaced.
        is_first: whether this is the first rank of the island.
    """
    partial = path.with_name(f".{path.name}.partial")
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    shards = {"state_dict": checkpoint["state_dict"]}
    shards |= {f"optimizer_{number}": state for number, state in enumerate(checkpoint.get("optimizer_states", []))}
    ours = checkpoint.get(KEY, {})
    if ours.get("tensors"):
        shards[KEY] = ours["tensors"]
    _distributed_checkpoint_save(shards, partial)  # begins and ends together
    if is_first:
        plain = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        if ours:
            plain[KEY] = {**ours, "tensors": {}}
        torch.save(plain, partial / _METADATA_FILENAME)
        remove(path)
        partial.replace(path)


def read_tensors(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """What :func:`write_shards` has written of the algorithm's state, in shards as the model's parameters are now.

    Collective in the island.

    Args:
        path: of a distributed checkpoint.
        model: whose parameters; what is of others, or of another shape, is left out.

    Returns:
        By kind and parameter, ``"slow/<name>"``.
    """
    reshard(sharded_modules(model))
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for flat_key, of in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        key = flat_key.removeprefix(f"{KEY}.")
        parameter = parameters.get(key.partition("/")[2])
        if key != flat_key and isinstance(of, TensorStorageMetadata) and parameter is not None and of.size == parameter.shape:
            found[key] = torch.zeros_like(parameter.detach(), dtype=of.properties.dtype)
    if found:
        _distributed_checkpoint_load({KEY: found}, path)
    return found


def in_one_file(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint in whose part of ours nothing is in shards. Collective in the island."""
    if not checkpoint.get(KEY, {}).get("tensors"):
        return checkpoint
    tensors = {key: _full(tensor) for key, tensor in checkpoint[KEY]["tensors"].items()}
    return {**checkpoint, KEY: {**checkpoint[KEY], "tensors": tensors}}


def own_shards(state: Any) -> Any:
    """A rank's own state with its shards alone in it, as plain tensors: for this rank to go on from.

    Args:
        state: of tensors, mappings, lists and plain values; not changed.
    """
    if isinstance(state, DTensor):
        return local(state).cpu()
    if isinstance(state, Mapping):
        return {key: own_shards(value) for key, value in state.items()}
    return [own_shards(value) for value in state] if isinstance(state, list) else state


@torch.no_grad()
def load_own_shards(state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put back a state of :func:`own_shards` with the entries ``model`` and ``optimizers``."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            _local(tensor.detach()).copy_(state["model"][name])
    for optimizer, of in zip(optimizers, state["optimizers"], strict=True):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = {
            number: {name: _shard_of(value, parameters[number]) for name, value in values.items()}
            for number, values in of["state"].items()
        }
        optimizer.load_state_dict({**of, "state": entries})


def _shard_of(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == local(parameter).shape:
        return as_whole(value.to(parameter.device), parameter)
    return value


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or the folder of a distributed one, if there is one.

    Raises:
        IsADirectoryError: for another folder.
    """
    if path.is_dir() and not _is_sharded_checkpoint(path) and any(path.iterdir()):
        raise IsADirectoryError(f"{path} is a folder, and no checkpoint: it is not replaced by one.")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mean_state(
    state: dict[str, Any], model: nn.Module, workers: Workers, groups: IslandGroups, *, keeps: Callable[[], bool]
) -> dict[str, Any]:
    """The state of one optimizer, each rank's shards averaged over the islands that have them, in host memory. Collective.

    An island that never used a parameter has no momentum for it, so the tensors present may differ.

    Args:
        state: by the parameters' names, as ``get_optimizer_state_dict`` gives it; not changed.
        model: whose parameters.
        workers: of all islands.
        groups: of this rank.
        keeps: whether this rank's island wants it, which the first one may only; the others get it with an empty ``"state"``.
            Asked anew when a worker has failed meanwhile.
    """
    return workers.attempt(lambda: _mean_state(state, model, workers, groups, keep=keeps()))


@torch.no_grad()
def _mean_state(
    state: dict[str, Any], model: nn.Module, workers: Workers, groups: IslandGroups, *, keep: bool
) -> dict[str, Any]:
    states, index = state["state"], groups.place.index
    told = workers.gather((index, described(states, part=_local)), kind="the state of an optimizer in shards")
    peers = [theirs for at, theirs in told if at == index]
    kept: dict[str, dict[str, Any]] = {}
    for parameter, name, value in means(states, peers, group=groups.peers, device=_HOST, part=_local):
        if keep:
            own = states.get(parameter, {}).get(name)
            made = value if value is own or not isinstance(value, Tensor) else _like(own, parameter, value, model)
            if made is not None:
                kept.setdefault(parameter, {})[name] = made
    return {**state, "state": kept}


def _like(own: Tensor | None, parameter: str, value: Tensor, model: nn.Module) -> Tensor | None:
    """A rank's part of a tensor as its optimizer has it, or would have it, in host memory."""
    if own is None:
        reshard(sharded_modules(model))
        own = dict(model.named_parameters()).get(parameter)
        if own is None or _local(own).shape != value.shape:
            return value if value.dim() == 0 or not is_averaged(value) else None
    return on_host_as(value, own.detach())


def _local(tensor: Tensor) -> Tensor:
    return local(tensor) if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    """All of a tensor in shards, in host memory; the device holds it for a moment. Collective in the island."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    on_device = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor().cpu()


def gathered(state: Mapping[str, Any], model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """An optimizer's state in whole tensors in host memory, by the parameters' numbers, for a checkpoint in one file.

    Collective in the island.

    Args:
        state: in shards, by the parameters' names.
        model: whose parameters.
        keep: whether this rank wants it; the others get an empty one.
    """
    whole: dict[str, dict[str, Any]] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            full = _full(value) if isinstance(value, Tensor) else value
            if keep:
                whole.setdefault(parameter, {})[name] = full
    if not keep:
        return {}
    named = _as_compiled({**state, "state": whole}, model)
    numbered: dict[str, Any] = FullyShardedDataParallel.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model)
    return numbered


def _as_compiled(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """An optimizer's state by the names that parameters have in a model of which parts are compiled, as Lightning has them; the
    first releases that are supported leave the names as they are."""
    align = getattr(model_parallel, "_align_compiled_param_names_with_module", None)
    aligned: dict[str, Any] = state if align is None else align(state, model)
    return aligned
