"""Training without a word."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import TensorDataset


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
