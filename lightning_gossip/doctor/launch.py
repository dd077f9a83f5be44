"""The ranks as the user's launcher has started them: torchrun, SLURM, LSF, MPI, variables by hand, or this command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_gossip.errors import ConfigurationError

_LAUNCHERS: tuple[type[ClusterEnvironment], ...] = (
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)
_END_S = 10.0  # for processes that this one has started, before they are killed


@dataclass(frozen=True)
class Place:
    """Which of the ranks a process is.

    Args:
        rank, world_size, local_rank: as always.
        host, port: of the job's store.
        launcher: who has started it.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    launcher: str


def place() -> Place | None:
    """The place of this process among the workers, as its launcher says; None if it has none.

    Raises:
        ConfigurationError: for variables that do not go together.
    """
    for kind in _LAUNCHERS:
        if kind.detect():
            try:
                found = kind()
                store = found.main_address, found.main_port
            except RuntimeError as error:
                raise ConfigurationError(str(error)) from error
            launcher = kind.__name__.removesuffix("Environment")
            return Place(found.global_rank(), found.world_size(), found.local_rank(), *store, launcher)
    if "WORLD_SIZE" not in os.environ:
        return None
    names = ("RANK" if "RANK" in os.environ else "NODE_RANK", "WORLD_SIZE", "MASTER_PORT")
    values = [os.environ.get(name, "") for name in names]
    if not all(value.isdigit() for value in values) or not os.environ.get("MASTER_ADDR"):
        given = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise ConfigurationError(
            f"WORLD_SIZE is set, and the rest is not ({given}). Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
            " process, or use torchrun."
        )
    rank, size, port = map(int, values)
    if rank >= size:
        raise ConfigurationError(f"{names[0]}={rank} is not below WORLD_SIZE={size}. Ranks are 0 to {size - 1}.")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Place(rank, size, local_rank, os.environ["MASTER_ADDR"], port, "variables")


@contextmanager
def started_here(workers: int | None, arguments: Sequence[str]) -> Iterator[Place]:
    """Be rank 0, and start the other ranks on this machine; they have ended at the end.

    Args:
        workers: how many; as many as there are GPUs if None, and two at least.
        arguments: of the command.
    """
    workers = max(2, torch.cuda.device_count()) if workers is None else workers
    port = find_free_network_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    os.environ.update(shared)
    command = [sys.executable, "-m", "lightning_gossip.doctor", *arguments]
    others = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(1, workers)
    ]
    try:
        yield Place(0, workers, 0, "127.0.0.1", port, "this command")
    finally:
        for other in others:
            _end(other)
        for name in shared:
            del os.environ[name]


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
