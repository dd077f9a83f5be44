"""The workers of one job of a sweep, each a process of its own.

Run alone, Lightning starts the workers by running the command line again for each (``popen``); in a sweep that would run the
whole sweep again. Here they come from a fork server, which has imported everything and has neither threads nor a GPU context.
Apart from that they are what popen's workers are: each runs the whole job, finds its rank in the environment, and rank 0's
result is in the folder of the job.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessContext, start_processes

from recipes.commands import cleaning_up_on_sigterm

_PRELOAD = ("recipes.job", "recipes.digits", "recipes.vision.data")  # what takes long to import
_GRACE_S = 10.0  # for the other workers to end by themselves when one has failed


def started_from_outside() -> bool:
    """Whether torchrun, SLURM or their like have started a process for each worker already."""
    schedulers = (SLURMEnvironment, TorchElasticEnvironment, LSFEnvironment, MPIEnvironment)
    return any(scheduler.detect() for scheduler in schedulers) or LightningEnvironment().creates_processes_externally


def run_workers(job: Callable[[DictConfig], Any], cfg: DictConfig, workers: int) -> None:
    """Run a job in so many processes and wait for them.

    Args:
        job: importable.
        cfg: of the job.
        workers: how many.

    Raises:
        ProcessRaisedException: with the traceback of the worker that failed first.
        ProcessExitedException: if that one was killed.
    """
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)  # Hydra's own resolvers know this process only
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
    with reserved_port() as port:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers), "NODE_RANK": "0"}
        arguments = (job, resolved, environment, logging.getLogger().getEffectiveLevel())
        context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
            _worker, arguments, workers, join=False, start_method="forkserver"
        )
        try:
            with cleaning_up_on_sigterm():
                while not context.join(grace_period=_GRACE_S):
                    pass
        finally:
            _end(context.processes)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the kernel gives to nobody else in the seconds until rank 0 listens on it: torch's store reuses addresses."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def _end(processes: Sequence[Any]) -> None:
    """Workers that still run: ask them to stop, wait a little, kill."""
    living = [process for process in processes if process.is_alive()]
    for process in living:
        process.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    for process in living:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _worker(rank: int, job: Callable[[DictConfig], Any], cfg: Any, environment: dict[str, str], level: int) -> None:
    threading.Thread(target=_end_with_the_sweep, name="end-with-the-sweep", daemon=True).start()
    os.environ.update(environment, LOCAL_RANK=str(rank))
    logging.basicConfig(level=level, stream=sys.stdout, format="[%(levelname)s] %(message)s")
    job(OmegaConf.create(cfg))


def _end_with_the_sweep() -> None:
    """The fork server would keep the workers of a sweep that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
