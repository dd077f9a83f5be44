"""Training without a word."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import TensorDataset

from benchmarks.harness.workers import rank


def trainer(**options: Any) -> Trainer:
    """On the CPU, this process as one worker of all; it prints and keeps nothing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    workers = {"devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"])}
    return Trainer(**{"accelerator": "cpu", **workers, **quiet, **options})


def repeated(data: TensorDataset, samples: int) -> TensorDataset:
    """The same samples over and over, until there are so many."""
    index = torch.arange(samples) % len(data)
    return TensorDataset(*(tensor[index] for tensor in data.tensors))


@contextmanager
def torchft_manager(
    load: Callable[[Any], Any], state: Callable[[], Any], *, min_replica_size: int, timeout: timedelta, **options: Any
) -> Iterator[Any]:
    """Of a replica group of one, this worker.

    Args:
        load: takes the state of another worker.
        state: this worker's.
        min_replica_size: how many workers there must be.
        timeout: of an all-reduce.
        options: torchft's.
    """
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

    here = os.environ["HOST_ADDR"]
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=min_replica_size,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        replica_id=f"worker-{rank()}",
        hostname=here,
        **options,
    )
    yield manager
    manager.shutdown(wait=False)
