"""A worker is killed in the middle of an epoch, its launcher starts it again, and it is admitted: what did that cost?"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.gpu.machine import Setting
from benchmarks.gpu.network import Classifier, Images, trainer_options
from benchmarks.harness import Recorder, rank, recorded, trainer, wait, workers
from benchmarks.harness.workers import last_words, results
from lightning_gossip import ADPSGDStrategy

WORKERS = 3
TIMEOUT_S = 80.0
EPOCHS = 200  # at most: training ends when the killed worker has come back and has trained
_KILLED_IN, _BATCH = 1, 3  # epoch and batch


def measure(setting: Setting, left_s: float) -> dict[str, Any]:
    """Train with the last worker killed and started again.

    Args:
        setting: of the run.
        left_s: seconds that it may take.

    Raises:
        RuntimeError: if a worker failed, or they did not end in time.
    """
    size, batches = (64, 20) if setting.cuda else (16, 10)
    parameters = {"cuda": setting.cuda, "batches": WORKERS * batches, "size": size, "step_s": 0.02 if setting.quick else 0.05}
    until_s = time.monotonic() + min(TIMEOUT_S, left_s)
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as name:
        folder, last = Path(name), WORKERS - 1
        with workers(train, parameters, folder, hosts=(None,) * WORKERS) as started:
            try:
                started[last].wait(until_s - time.monotonic())  # for its end, which it brings about itself
            except TimeoutError as error:
                raise RuntimeError(f"The last worker was not killed: {error}") from error
            ended_s = time.monotonic()
            if not (folder / "killed.happened").exists():
                raise RuntimeError(f"A worker failed:\n{last_words(started)}")
            started.append(started[last].another())
            started[-1].start()
            if not wait(started, max(0.0, until_s - time.monotonic()), killed={last}):
                raise RuntimeError(f"The workers did not end in time:\n{last_words(started)}")
            ended = results(folder)
            return {
                **_account(recorded(folder), folder, WORKERS * batches),
                "started_after_s": ended_s - _killed_s(folder),
                **ended[0],
            }


def _killed_s(folder: Path) -> float:
    return float((folder / "killed.happened").read_text())


def _account(steps: pd.DataFrame, folder: Path, batches: int) -> dict[str, Any]:
    killed_s, last = _killed_s(folder), WORKERS - 1
    later = steps[steps.at_s > killed_s]
    back = later[later["rank"] == last]
    taken = steps.explode("samples").groupby("epoch").samples
    whole = taken.nunique()[: int(steps.epoch.max())]  # in the last epoch training was ended
    return {
        "next_step_s": float(later[later["rank"] != last].groupby("rank").at_s.min().max() - killed_s),
        "back_s": float(back.at_s.min() - killed_s),
        "steps_of_the_returned": len(back),
        "epochs": int(steps.epoch.max()) + 1,
        "samples_missing": int((batches * BATCH - whole).sum()),
    }


BATCH = 8


class Victim(Callback):
    """Writes down the steps; the last worker ends in one of them, and all end when it has come back and made an epoch."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self._folder = folder
        self._steps = Recorder(folder)
        self._step_s = step_s
        self._came_in: int | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self._step_s)
        happened = self._folder / "killed.happened"
        if (rank(), trainer.current_epoch, batch_idx) == (WORKERS - 1, _KILLED_IN, _BATCH) and not happened.exists():
            happened.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._steps.note(epoch=trainer.current_epoch, samples=batch[2].tolist())
        members = trainer.strategy.members  # type: ignore[attr-defined]
        if members.excluded and len(members.members) == WORKERS:
            self._came_in = trainer.current_epoch if self._came_in is None else self._came_in
            if trainer.current_epoch > self._came_in:
                trainer.should_stop = True


def train(cuda: bool, batches: int, size: int, step_s: float, folder: Path) -> dict[str, Any]:
    """In each worker, and in the one that is started again."""
    seed_everything(0, verbose=False)
    strategy = ADPSGDStrategy(process_group_backend="gloo" if cuda and torch.cuda.device_count() < WORKERS else None)
    fit = trainer(
        strategy=strategy, max_epochs=EPOCHS, callbacks=[Victim(folder, step_s)], **trainer_options(cuda=cuda, rank=rank())
    )
    model = Classifier(cuda=cuda)
    fit.fit(model, DataLoader(Images(batches * BATCH, size), batch_size=BATCH, shuffle=True))
    sums = strategy.all_gather(torch.stack([parameter.detach().float().sum() for parameter in model.parameters()]).sum())
    return {"models_equal": bool((sums == sums.flatten()[0]).all()), "workers_at_the_end": fit.world_size}
