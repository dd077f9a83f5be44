"""What SLURM does when the time of a job is over, played by the test: variables, a signal, and a command to queue it again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer
from tests.strategies.test_conformance import CASES

pytestmark = pytest.mark.processes
SAMPLES, BATCH, EPOCHS = 256, 8, 3


def _as_slurm_would(folder: Path) -> None:
    """In place of the variables of torchrun."""
    rank, workers = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID="4711",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS=workers,
        SLURM_NTASKS_PER_NODE=workers,
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        PATH=f"{folder}:{os.environ['PATH']}",
    )


class TimeIsOver(Callback):
    """Some workers get the signal in the middle of a step of the second epoch, each of another one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks

    def on_before_backward(self, trainer: Any, model: Any, loss: Any) -> None:
        if trainer.global_rank in self._ranks and (trainer.current_epoch, len(model.seen)) == (1, self._due(model)):
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
        model.seen = []

    def _due(self, model: Any) -> int:
        return BATCH * (1 + int(os.environ["SLURM_PROCID"]))


def _until_time_is_over(folder: str, strategy: Any, ranks: tuple[int, ...]) -> Any:
    _as_slurm_would(Path(folder))
    model = Net()
    t = trainer(strategy=strategy, max_epochs=EPOCHS, callbacks=[TimeIsOver(ranks)], default_root_dir=folder)
    with pytest.raises(SIGTERMException):
        t.fit(model, loader(SAMPLES, BATCH))
    return model.seen, flat(model).tolist()


class Epochs(Callback):
    """The samples of each epoch."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def on_train_batch_end(self, trainer: Any, model: Any, output: Any, batch: Any, batch_idx: int) -> None:
        self.seen.setdefault(trainer.current_epoch, []).extend(batch[2].tolist())


def _again(folder: str, strategy: Any) -> Any:
    _as_slurm_would(Path(folder))
    model, epochs = Net(), Epochs()
    t = trainer(strategy=strategy, max_epochs=EPOCHS, callbacks=[epochs], default_root_dir=folder)
    t.fit(model, loader(SAMPLES, BATCH))
    return epochs.seen, t.current_epoch


def _queue(folder: Path) -> Path:
    """A command ``scontrol`` that writes down what it was called with."""
    calls, command = folder / "calls", folder / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    command.chmod(0o755)
    return calls


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("adpsgd", (0, 1), marks=pytest.mark.slow),
        ("adpsgd", (1,)),
        ("dpsgd", (0, 1)),
        *(pytest.param(name, (0,), marks=pytest.mark.slow) for name in ("apsgd", "eamsgd", "periodic_averaging", "qsgd")),
    ],
)
def test_when_the_time_is_over_the_job_stops_together_and_goes_on_when_it_is_started_again(
    name: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    make = dict(CASES)[name]
    calls = _queue(tmp_path)
    stopped = launch(_until_time_is_over, str(tmp_path), make(), ranks, workers=2)
    assert calls.read_text() == "requeue 4711\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert stopped[0][1] == stopped[1][1]
    results = launch(_again, str(tmp_path), make(), workers=2)
    assert {ended for _, ended in results} == {EPOCHS}
    before = [sample for seen, _ in stopped for sample in seen]
    after = [sample for epochs, _ in results for sample in epochs.get(1, [])]
    assert not set(before) & set(after)
    assert set(before) | set(after) == set(range(SAMPLES))
    padding = 0 if name in ("adpsgd", "apsgd") else BATCH  # equal shares of an odd number of batches
    assert 0 < len(before) < len(before + after) <= SAMPLES + padding
    assert sorted(sample for epochs, _ in results for sample in epochs[2]) == list(range(SAMPLES))
