"""Under Fabric: workers that come back, writers that are killed, checkpoints in the middle of an epoch, and those of DDP."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_gossip import ADPSGDStrategy, ConfigurationError, DPSGDStrategy, PeriodicAveragingStrategy
from lightning_gossip.strategies.fabric import checkpoint
from tests.strategies.jobs import DIED, job, kill_myself, survivors
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader
from tests.strategies.test_fabric import _fabric, _flat

pytestmark = pytest.mark.processes

WORKERS, SAMPLES, BATCH = 3, 120, 8
Hook = Callable[[int, int], Any]


def _number() -> int:
    return int(os.environ["RANK"])


class _Script:
    """A user's script with all that goes with it: a schedule, an average of the weights, a counter."""

    def __init__(self, fabric: Any, *, samples: int = SAMPLES, lr: float = 0.1) -> None:
        self.fabric = fabric
        module = Net().network
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
        self.module, self.optimizer = module, optimizer
        self.model, self.stepped = fabric.setup(module, optimizer)
        self.average = Net().network
        self.average.load_state_dict(module.state_dict())
        self.schedule = StepLR(optimizer, 1, gamma=0.97)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.stepped,
            "schedule": self.schedule,
            "average": self.average,
            "done": 0,
        }
        self.data = fabric.setup_dataloaders(loader(samples, BATCH))
        self.seen: list[tuple[int, int]] = []

    def train(self, epoch: int, *, each_batch: Hook = lambda *_: None, step_s: float = 0.0) -> None:
        for number, (x, y, index) in enumerate(self.data):
            self.seen += [(epoch, sample) for sample in index.tolist()]
            self.fabric.backward(nn.functional.cross_entropy(self.model(x), y))
            self.stepped.step()
            self.stepped.zero_grad()
            each_batch(epoch, number)
            time.sleep(step_s)
        self.schedule.step()
        with torch.no_grad():
            for ours, theirs in zip(self.average.parameters(), self.module.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        self.state["done"] = epoch + 1

    def result(self) -> dict[str, Any]:
        return {
            "model": _flat(self.module),
            "average": _flat(self.average),
            "lr": self.optimizer.param_groups[0]["lr"],
            "momentum": sum(float(state["momentum_buffer"].norm()) for state in self.optimizer.state.values()),
            "done": self.state["done"],
            "seen": self.seen,
            "world_size": self.fabric.world_size,
        }


def _of_epoch(results: list[dict[str, Any]], epoch: int) -> list[int]:
    return sorted(sample for result in results for number, sample in result["seen"] if number == epoch)


# -- workers that come back ------------------------------------------------------------------------------------------------


def _until_it_is_back(folder: str, victim: int) -> dict[str, Any]:
    first_life = not Path(folder, "killed").exists()

    def each_batch(epoch: int, number: int) -> None:
        if _number() == victim and first_life and (epoch, number) == (1, 0):
            Path(folder, "killed").touch()
            kill_myself()

    with _fabric(ADPSGDStrategy(peer_timeout_s=6)) as fabric:
        script = _Script(fabric)
        for epoch in fabric.strategy.epochs_left(400, script.state):
            script.train(epoch, each_batch=each_batch)
            if epoch > 2 and fabric.world_size == WORKERS:
                break
        return script.result()


def test_a_worker_that_comes_back_is_taken_in_with_all_that_the_script_names(tmp_path: Path) -> None:
    with job(_until_it_is_back, str(tmp_path), 2, workers=WORKERS) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pids[2])], timeout=60)
        running.start(2)
        results = survivors(running.outcomes())
    assert len(results) == WORKERS
    for result in results:
        for name in ("model", "average", "lr", "done"):
            assert result[name] == results[0][name], name
        assert result["momentum"] > 0
    last = results[0]["done"] - 1
    assert _of_epoch(results, last) == list(range(SAMPLES))
    assert results[0]["lr"] == pytest.approx(0.1 * 0.97 ** results[0]["done"])


def _frozen(folder: str, epochs: int) -> dict[str, Any]:
    def each_batch(epoch: int, number: int) -> None:
        if _number() == 2 and (epoch, number) == (1, 0):
            Path(folder, "frozen").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    with _fabric(ADPSGDStrategy(peer_timeout_s=2)) as fabric:
        script = _Script(fabric)
        for epoch in fabric.strategy.epochs_left(epochs, script.state):
            script.train(epoch, each_batch=each_batch)
            present = int(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum"))
            if present == WORKERS and Path(folder, "goes on").exists():
                break
            if present == WORKERS - 1:
                Path(folder, "goes on").touch()
        return script.result()


@pytest.mark.slow
def test_a_worker_that_was_frozen_for_too_long_is_taken_in_again(tmp_path: Path) -> None:
    with job(_frozen, str(tmp_path), 4000, workers=WORKERS) as running:
        pids = running.start_all()
        deadline = time.monotonic() + 60
        while not (tmp_path / "goes on").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(pids[2], signal.SIGCONT)
        results = survivors(running.outcomes())
    assert len(results) == WORKERS
    models = {tuple(result["model"]) for result in results}
    assert len(models) == 1


def _late_without_a_place(folder: str) -> tuple[str]:
    with _fabric(ADPSGDStrategy(peer_timeout_s=6)) as fabric:
        script = _Script(fabric)
        if _number() == 2 and Path(folder, "killed").exists():
            try:
                script.train(0)
            except ConfigurationError as error:
                Path(folder, "refused").touch()
                return (str(error),)
            return ("trained",)
        for epoch in range(400):
            if _number() == 2 and epoch == 1:
                Path(folder, "killed").touch()
                kill_myself()
            script.train(epoch)
            if float(fabric.all_reduce(torch.tensor(float(Path(folder, "refused").exists())), reduce_op="sum")):
                break
    return ("ended",)


@pytest.mark.slow
def test_a_script_that_takes_nobody_in_says_what_to_write(tmp_path: Path) -> None:
    with job(_late_without_a_place, str(tmp_path), workers=WORKERS) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pids[2])], timeout=60)
        running.start(2)
        results = survivors(running.outcomes())
    assert sorted(results)[1:] == [("ended",), ("ended",)]
    assert "for epoch in fabric.strategy.epochs_left(EPOCHS, state)" in sorted(results)[0][0]


# -- writers that are killed ------------------------------------------------------------------------------------------------


def _killed_while_it_saves(folder: str, inside: bool) -> dict[str, Any]:
    from lightning_gossip.strategies.state import atomic_checkpoint_io

    write = atomic_checkpoint_io.write_checkpoint

    def dies(state: dict[str, Any], path: Path) -> None:
        if _number() == 0:
            kill_myself()
        write(state, path)

    atomic_checkpoint_io.write_checkpoint = dies
    with _fabric(ADPSGDStrategy(peer_timeout_s=5)) as fabric:
        script = _Script(fabric)

        def each_batch(epoch: int, number: int) -> None:
            # of shared work each worker is sure of one batch; rank 0 asks when the others have said what they would save
            if not inside or epoch != 1 or number != 0:
                return
            if _number() == 0:
                deadline = time.monotonic() + 30
                while len(list(Path(folder).glob("asked-*"))) < WORKERS - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
            fabric.save(f"{folder}/1.ckpt", {**script.state, "done": epoch})
            Path(folder, f"asked-{_number()}").touch()

        for epoch in fabric.strategy.epochs_left(3, script.state):
            script.train(epoch, each_batch=each_batch)
            if epoch == 1 and not inside:
                fabric.save(f"{folder}/1.ckpt", script.state)
        return script.result()


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_next_rank_0_writes_the_checkpoint_in_which_the_first_was_killed(inside: bool, tmp_path: Path) -> None:
    with job(_killed_while_it_saves, str(tmp_path), inside, workers=WORKERS) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert dict(outcomes)[0] == DIED
    results = survivors(outcomes)
    assert results[0]["model"] == results[1]["model"]
    saved = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert saved["done"] == (1 if inside else 2)
    assert saved[checkpoint.KEY]["epoch"] == (1 if inside else 2)
    assert (saved[checkpoint.KEY]["position"] is not None) == inside
    assert _of_epoch(results, 2) == list(range(SAMPLES))


# -- a resume in the middle of an epoch ---------------------------------------------------------------------------------------

STRATEGIES: dict[str, Callable[[], Any]] = {
    "adpsgd": lambda: ADPSGDStrategy(),
    "dpsgd": lambda: DPSGDStrategy(),
    "periodic_averaging": lambda: PeriodicAveragingStrategy(period=2),
}


def _await_request(fabric: Any, written: Path, deadline_s: float = 60.0) -> None:
    """Until another worker has asked all to meet, or they have met, and the file is written."""
    until_s = time.monotonic() + deadline_s
    while not (fabric.strategy.training.algorithm.sync_requested() or written.is_file()):
        assert time.monotonic() < until_s
        time.sleep(0.005)


def _saves_inside(strategy: str, folder: str) -> list[tuple[int, int]]:
    """Rank 0 saves after its first batch of the second epoch: what is trained on afterwards is lost."""
    with _fabric(STRATEGIES[strategy]()) as fabric:
        script = _Script(fabric)
        kept: list[tuple[int, int]] = []

        def each_batch(epoch: int, number: int) -> None:
            if (epoch, number) == (1, 0) and fabric.global_rank == 0:
                fabric.save(f"{folder}/inside.ckpt", script.state)
            elif (epoch, number) == (1, 0) and strategy == "adpsgd":
                _await_request(fabric, Path(folder, "inside.ckpt"))  # else the others may have claimed all batches before
            kept[:] = script.seen

        for epoch in fabric.strategy.epochs_left(2, script.state):
            script.train(epoch, each_batch=each_batch)
        return kept


def _resumes(strategy: str, folder: str, own_range: bool) -> dict[str, Any]:
    with _fabric(STRATEGIES[strategy]()) as fabric:
        script = _Script(fabric)
        rest = fabric.load(f"{folder}/inside.ckpt", script.state)
        assert rest == {}
        epochs = range(1, 3) if own_range else fabric.strategy.epochs_left(3, script.state)
        for epoch in epochs:
            script.train(epoch)
        return script.result()


@pytest.mark.parametrize(
    ("strategy", "workers", "own_range"),
    [
        ("adpsgd", WORKERS, False),
        pytest.param("adpsgd", 2, False, marks=pytest.mark.slow),
        pytest.param("adpsgd", 1, True, marks=pytest.mark.slow),
        pytest.param("dpsgd", WORKERS, True, marks=pytest.mark.slow),
        pytest.param("periodic_averaging", 2, False, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_from_inside_an_epoch_goes_on_with_the_batches_that_nobody_had_taken(
    strategy: str, workers: int, own_range: bool, tmp_path: Path
) -> None:
    launch(_saves_inside, strategy, str(tmp_path), workers=WORKERS)
    stands = torch.load(tmp_path / "inside.ckpt", weights_only=True)[checkpoint.KEY]
    left = stands["position"]["left"]["pending"]
    assert (stands["epoch"], stands["passes"]) == (1, 1)
    assert 0 < len(left) < SAMPLES // BATCH
    results = launch(_resumes, strategy, str(tmp_path), own_range, workers=workers)
    resumed = _of_epoch(results, 1)
    batches = checkpoint.EpochPlan(**stands["position"]["plan"]).batches(1)
    assert set(resumed) == {sample for index in left for sample in batches[index]}
    assert len(resumed) <= len(left) * BATCH + workers * BATCH * (strategy != "adpsgd")  # static shares come out even
    assert set(_of_epoch(results, 2)) == set(range(SAMPLES))
    assert results[0]["done"] == 3
    assert all(result["model"] == results[0]["model"] for result in results)


# -- DDP's checkpoints, and ours under DDP ------------------------------------------------------------------------------------


def _trains_and_saves(strategy: Any, path: str) -> list[float]:
    with _fabric(strategy) as fabric:
        script = _Script(fabric)
        script.train(0)
        fabric.save(path, script.state)
        return _flat(script.module)


def _loads_and_trains(strategy: Any, path: str) -> dict[str, Any]:
    with _fabric(strategy) as fabric:
        script = _Script(fabric)
        rest = fabric.load(path, script.state)
        loaded = _flat(script.module)
        momentum = script.result()["momentum"]
        assert script.state["done"] == 1
        for epoch in range(1, 3):
            script.train(epoch)
        return {**script.result(), "loaded": loaded, "loaded_momentum": momentum, "rest": sorted(rest)}


@pytest.mark.parametrize("writer", ["adpsgd", pytest.param("ddp", marks=pytest.mark.slow)])
def test_checkpoints_go_from_ddp_to_us_and_back(writer: str, tmp_path: Path) -> None:
    reader = {"ddp": "adpsgd", "adpsgd": "ddp"}[writer]
    path = str(tmp_path / "end.ckpt")
    written = launch(_trains_and_saves, writer, path, workers=2)
    results = launch(_loads_and_trains, reader, path, workers=2)
    assert all(result["loaded"] == written[0] for result in results)
    assert all(result["loaded_momentum"] > 0 for result in results)
    assert results[0]["rest"] == ([checkpoint.KEY] if reader == "ddp" else [])
    assert all(math.isfinite(value) for value in results[0]["model"])
    for epoch in (1, 2):
        assert _of_epoch(results, epoch) == list(range(SAMPLES))
