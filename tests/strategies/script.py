"""A user's script, for the tests of Lightning's launchers: ``python script.py OUT STRATEGY [MODE] [DEVICES] [NODES]``."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_gossip  # noqa: F401 - registers the strategies
from tests.strategies.models import Net, flat, loader


def tell_what_is_left(out: str) -> None:
    """What lives when the interpreter begins to end: registered before anything else, so called last."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # joined, and ends now
            names.append(Path(task, "comm").read_text().strip())
    left = {"group": dist.is_initialized(), "gloo": [name for name in names if "gloo" in name]}
    Path(out, f"left-{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(left))


class Trouble(Callback):
    """What the mode says, in the third step of rank 1, or 0."""

    def __init__(self, mode: str, out: str) -> None:
        self.mode = mode
        self.out = out
        self.rank = -1

    def on_fit_start(self, trainer: Trainer, model: Any) -> None:
        self.rank = trainer.global_rank  # that of the start: when a worker has died the others have new ones

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        rank = 0 if self.mode in ("raise0", "node") else 1
        if self.rank == rank and batch_idx == 3 and self.mode != "fit":
            print(f"strikes at {time.monotonic()}", flush=True)  # the machine's clock, one for all processes
            if self.mode.startswith("raise"):
                raise ArithmeticError(f"rank {rank} breaks in step 3")
            if self.mode == "kill":
                Path(self.out, "steps-before-the-kill").write_text(str(trainer.global_step))
                os.kill(os.getpid(), signal.SIGKILL)
            if self.mode == "node":  # with its agent, as if their machine were lost
                Path(self.out, "steps-before-the-kill").write_text(str(trainer.global_step))
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.mode == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)


def main(out: str, strategy: str, mode: str = "fit", devices: str = "2", nodes: str = "1") -> None:
    atexit.register(tell_what_is_left, out)
    trainer = Trainer(
        strategy=strategy,
        devices=int(devices),
        num_nodes=int(nodes),
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(out, "stopped"), Trouble(mode, out)],
    )
    model = Net()
    trainer.fit(model, loader(400, 4), loader(32, shuffle=False))
    if trainer.is_global_zero:
        workers = trainer.strategy.report.workers if hasattr(trainer.strategy, "report") else []
        result = {"accuracy": trainer.callback_metrics["val_acc"].item(), "sum": flat(model).sum().item()}
        Path(out, "result.json").write_text(json.dumps({**result, "workers": [w.as_dict() for w in workers]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
