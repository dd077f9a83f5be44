"""The strategies under Fabric: what a user's own loop may rely on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import nn

from lightning_gossip import (
    ADPSGDStrategy,
    ConfigurationError,
    DPSGDStrategy,
    FabricStrategy,
    PeriodicAveragingStrategy,
    QSGDStrategy,
)
from lightning_gossip.strategies import STRATEGIES, DecentralizedStrategy
from tests.scripts import run
from tests.strategies.jobs import DIED, job, kill_myself
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 120, 8, 2


# -- without a process ---------------------------------------------------------------------------------------------------


def test_every_strategy_is_known_to_fabric_by_its_name() -> None:
    for name, registered in STRATEGIES.items():
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            made = STRATEGY_REGISTRY.get(name + suffix)
            assert type(made) is FabricStrategy
            assert type(made.decentralized) is registered.cls
            assert made._start_method == start_method


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FabricStrategy("adpsgd"), "FabricStrategy(ADPSGDStrategy())"),
        (lambda: FabricStrategy(ADPSGDStrategy(at_rendezvous="evaluate")), "need the Trainer"),
        (lambda: FabricStrategy(ADPSGDStrategy(checkpoint="replicas")), "need the Trainer"),
        (lambda: FabricStrategy(ADPSGDStrategy(island=2)), "each process is a worker"),
        (lambda: FabricStrategy(ADPSGDStrategy()).synchronize(), "fabric.launch()"),
        (lambda: FabricStrategy(ADPSGDStrategy(), topology="ring"), "FabricStrategy(ADPSGDStrategy(topology='ring'))"),
        (lambda: FabricStrategy(ADPSGDStrategy(), epochs="3"), "got epochs='3'"),
        (lambda: list(FabricStrategy(ADPSGDStrategy()).epochs_left(0)), "got epochs=0"),
        (lambda: list(FabricStrategy(ADPSGDStrategy()).epochs_left(3, [])), "a dictionary as fabric.save takes it"),
        (lambda: ADPSGDStrategy(interface=7), "interface='eth0'"),
        (lambda: ADPSGDStrategy(find_unused_parameters=True), "there is no DDP here"),
        (lambda: PeriodicAveragingStrategy(period="adaptive"), "or what decides it, as AdaptivePeriod()"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        make()


def test_a_strategy_of_the_trainer_says_how_it_is_passed() -> None:
    assert "FabricStrategy(ADPSGDStrategy(...))" in repr(ADPSGDStrategy())
    assert "for the Trainer of lightning.pytorch write ADPSGDStrategy(...)" in repr(FabricStrategy(ADPSGDStrategy()))


def test_options_that_do_not_fit_the_workers_are_refused_before_there_are_any() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(ADPSGDStrategy(min_workers=3)))
    with pytest.raises(ConfigurationError, match="min_workers=3 is more than the 2 workers"):
        fabric.launch()


def _alone(strategy: str) -> Any:
    with _fabric(strategy) as fabric:
        module, seen, _ = _train(fabric)
        return _flat(module), seen


@pytest.mark.slow
@pytest.mark.processes
def test_one_worker_trains_plainly() -> None:
    ((ours, samples),) = launch(_alone, "adpsgd", workers=1)
    assert sorted(samples) == sorted(EPOCHS * list(range(SAMPLES)))
    assert all(math.isfinite(value) for value in ours)


# -- with three ----------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], DecentralizedStrategy | str], bool]] = {
    "adpsgd": (lambda: "adpsgd", True),
    "periodic_averaging": (lambda: PeriodicAveragingStrategy(period=2), False),
    "qsgd": (lambda: QSGDStrategy(bits=8), False),
    "dpsgd": (lambda: DPSGDStrategy(), False),
    "apsgd": (lambda: "apsgd", True),
    "diloco": (lambda: "diloco", False),
    "noloco": (lambda: "noloco", True),
    "adaptive_averaging": (lambda: "adaptive_averaging", False),
}
_QUICK = ("adpsgd", "qsgd")


@contextmanager
def _fabric(strategy: Any) -> Iterator[Fabric]:
    if isinstance(strategy, DecentralizedStrategy):
        strategy = FabricStrategy(strategy)
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=strategy)
    fabric.launch()
    try:
        yield fabric
    except BaseException as error:
        if isinstance(fabric.strategy, FabricStrategy):
            fabric.strategy.leave(error)
        raise
    fabric.strategy.teardown()


def _flat(module: nn.Module) -> list[float]:
    return torch.cat([value.detach().flatten().double() for value in module.state_dict().values()]).tolist()


def _train(
    fabric: Fabric,
    *,
    epochs: int = EPOCHS,
    accumulate: int = 1,
    each_batch: Callable[[int, int], Any] = lambda *_: None,
    note: Callable[[int, int], Any] = lambda *_: None,
) -> tuple[nn.Module, list[int], Any]:
    """Returns the module, the samples that this worker has trained on, and its optimizer."""
    module = Net().network
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, stepped = fabric.setup(module, optimizer)
    data = fabric.setup_dataloaders(loader(SAMPLES, BATCH))
    seen: list[int] = []
    for epoch in range(epochs):
        for number, (x, y, index) in enumerate(data):
            seen += index.tolist()
            for sample in index.tolist():
                note(epoch, sample)
            last = (number + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(nn.functional.cross_entropy(model(x), y) / accumulate)
            if last:
                stepped.step()
                stepped.zero_grad()
            each_batch(epoch, number)
    return module, seen, optimizer


def _whole(strategy: Any, folder: str) -> dict[str, Any]:
    with _fabric(strategy) as fabric:
        fabric.strategy.epochs = EPOCHS  # type: ignore[attr-defined]
        module, seen, optimizer = _train(fabric)
        held_out = fabric.setup_dataloaders(loader(50, 7, shuffle=False))
        with torch.no_grad():
            evaluated = [index for *_, of_batch in held_out for index in of_batch.tolist()]
        fabric.save(f"{folder}/end.ckpt", {"model": module, "optimizer": optimizer, "epoch": EPOCHS})
        restored = Net().network
        rest = fabric.load(f"{folder}/end.ckpt", {"model": restored})
        report = fabric.strategy.report  # type: ignore[attr-defined]
        return {
            "model": _flat(module),
            "restored": _flat(restored),
            "epoch": rest["epoch"],
            "seen": seen,
            "evaluated": evaluated,
            "progress": fabric.strategy.progress,  # type: ignore[attr-defined]
            "sum": float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum")),
            "told": fabric.broadcast(fabric.global_rank, src=1),
            "steps": [worker.steps for worker in report.workers],
            "distance": report.consensus_distance,
        }


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in CASES])
def test_an_epoch_is_every_sample_once_and_ends_with_one_model(name: str, tmp_path: Path) -> None:
    make, shares = CASES[name]
    results = launch(_whole, make(), str(tmp_path), workers=WORKERS)
    for result in results:
        assert result["model"] == results[0]["model"]
        assert result["restored"] == results[0]["model"]
        assert (result["epoch"], result["progress"], result["sum"], result["told"]) == (EPOCHS, EPOCHS, WORKERS, 1)
    seen = sorted(index for result in results for index in result["seen"])
    assert seen == sorted(EPOCHS * list(range(SAMPLES)))
    assert sorted(index for result in results for index in result["evaluated"]) == list(range(50))
    assert sum(results[0]["steps"]) == EPOCHS * SAMPLES // BATCH
    if not shares:
        assert len(set(results[0]["steps"])) == 1


def _accumulated(strategy: Any) -> Any:
    with _fabric(strategy) as fabric:
        module, _, _ = _train(fabric, epochs=1, accumulate=5)
        return _flat(module), [worker.steps for worker in fabric.strategy.report.workers]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.processes
def test_gradients_of_accumulated_batches_are_reduced_once() -> None:
    results = launch(_accumulated, QSGDStrategy(bits=8), workers=WORKERS)
    assert results[0][1] == [1] * WORKERS
    assert all(model == results[0][0] for model, _ in results)


def _saved_inside(folder: str) -> Any:
    def each_batch(epoch: int, number: int) -> None:
        if number == 0 and fabric.global_rank == 0:  # of shared work each worker is sure of one batch
            fabric.save(f"{folder}/inside-{epoch}.ckpt", {**held, "epoch": epoch})
            assert float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum")) == 1.0

    held: dict[str, Any] = {}
    with _fabric(ADPSGDStrategy()) as fabric:
        original = fabric.setup

        def setup(module: nn.Module, *optimizers: Any) -> Any:
            held.update(model=module, optimizer=optimizers[0])
            return original(module, *optimizers)

        fabric.setup = setup  # type: ignore[method-assign]
        _, seen, _ = _train(fabric, each_batch=each_batch)
        return seen


@pytest.mark.processes
def test_rank_0_saves_the_mean_between_two_batches_and_the_epoch_goes_on(tmp_path: Path) -> None:
    results = launch(_saved_inside, str(tmp_path), workers=WORKERS)
    assert sorted(index for seen in results for index in seen) == sorted(EPOCHS * list(range(SAMPLES)))
    for epoch in range(EPOCHS):
        saved = torch.load(tmp_path / f"inside-{epoch}.ckpt", weights_only=True)
        assert saved["epoch"] == epoch
        assert set(saved["model"]) == set(Net().network.state_dict())
        assert saved["optimizer"]["state"][0]["momentum_buffer"].abs().sum() > 0


def _left(strategy: Any) -> Any:
    with _fabric(strategy) as fabric:
        module = Net().network
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        data = fabric.setup_dataloaders(loader(SAMPLES, BATCH))
        for number, (x, y, _) in enumerate(data):
            if number == 1 + fabric.global_rank:
                break
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.synchronize()  # type: ignore[attr-defined]
        return _flat(module)


@pytest.mark.slow
@pytest.mark.processes
def test_a_loop_that_is_left_early_ends_by_synchronize() -> None:
    models = launch(_left, "adpsgd", workers=WORKERS)
    assert all(model == models[0] for model in models)


def _killed(victim: int) -> Any:
    def each_batch(epoch: int, number: int) -> None:
        if int(os.environ["RANK"]) == victim and (epoch, number) == (1, 0):
            kill_myself()

    with _fabric(ADPSGDStrategy(peer_timeout_s=5)) as fabric:
        seen: list[tuple[int, int]] = []
        module, _, _ = _train(fabric, epochs=3, each_batch=each_batch, note=lambda epoch, index: seen.append((epoch, index)))
        return _flat(module), seen, fabric.world_size


@pytest.mark.processes
@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_is_one_workers_problem(victim: int) -> None:
    with job(_killed, victim, workers=WORKERS) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert [outcome for rank, outcome in outcomes if rank == victim] == [DIED]
    left = [outcome for rank, outcome in outcomes if rank != victim]
    assert all(isinstance(outcome, tuple) for outcome in left), left
    assert left[0][0] == left[1][0]
    assert left[0][2] == left[1][2] == WORKERS - 1
    of_epoch = [sorted(index for _, seen, _ in left for number, index in seen if number == epoch) for epoch in range(3)]
    assert of_epoch[2] == list(range(SAMPLES))
    assert len(set(of_epoch[1])) == len(of_epoch[1]) >= SAMPLES - BATCH  # but for the batch that the victim had finished


SCRIPT = """
import sys
import torch
from torch import nn
from lightning.fabric import Fabric
import lightning_gossip
from tests.strategies.models import Net, loader


def train(fabric):
    module = Net().network
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    data = fabric.setup_dataloaders(loader(120, 8))
    for epoch in range(2):
        for number, (x, y, _) in enumerate(data):
            if sys.argv[2] == "raises" and (epoch, number, fabric.global_rank) == (1, 0, 1):
                raise RuntimeError("a bug")
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if fabric.is_global_zero:
        print("steps", sum(worker.steps for worker in fabric.strategy.report.workers))


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    fabric.launch(train) if "_" in sys.argv[1] else (fabric.launch(), train(fabric))
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["adpsgd", pytest.param("adpsgd_spawn", marks=pytest.mark.slow), "adpsgd_fork"])
def test_fabric_starts_the_workers(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run(str(tmp_path / "script.py"), name, "ends", folder=tmp_path)
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    assert "steps 30" in ended.stdout


@pytest.mark.processes
@pytest.mark.parametrize("name", ["adpsgd", pytest.param("adpsgd_fork", marks=pytest.mark.slow)])
def test_an_exception_on_one_worker_ends_all(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run(str(tmp_path / "script.py"), name, "raises", folder=tmp_path, timeout_s=60.0)
    assert ended.returncode != 0, ended.output
    assert ended.left == []
    assert "RuntimeError: a bug" in ended.output
