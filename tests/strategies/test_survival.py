"""Workers that are killed, frozen, or come back: what the others do."""

from __future__ import annotations

import csv
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from lightning_gossip import ADPSGDStrategy, PeerError
from lightning_gossip.transport import gloo_group
from tests.runtime.cluster import eventually
from tests.strategies.jobs import DIED, job, kill_myself, store, survivors
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes

SAMPLES = 240
MOVES = 20  # of a schedule by step in an epoch: batches of 4, dealt out to the three workers that began
HOOKS = {  # where a worker is killed: (hook, in which epoch)
    "during setup": ("setup", 0),
    "before the first exchange": ("on_train_start", 0),
    "inside the epoch": ("on_train_batch_start", 1),
    "during a validation": ("on_validation_batch_start", 1),
    "between validation and checkpoint": ("on_validation_end", 1),
    "when the epoch has ended": ("on_train_epoch_end", 1),
    "when the next one begins": ("on_train_epoch_start", 1),
}


class Killed(Callback):
    """Ends its process without a word: at a hook, in an epoch, on one rank; in the sixth batch, if it is a batch's hook.

    Of shared work each worker is sure of one batch: ``after`` so many.
    """

    def __init__(self, rank: int, hook: str, epoch: int, *, after: int = 5) -> None:
        self._batches = 0

        def kill(trainer: Any, *_: Any, **__: Any) -> None:
            if _number() != rank or (trainer.current_epoch, trainer.sanity_checking) != (epoch, False):
                return
            self._batches += 1
            if self._batches > after or hook != "on_train_batch_start":
                kill_myself()

        setattr(self, hook, kill)


class Steps(Callback):
    """Steps of a length, and the samples of each epoch, written down as they are trained on."""

    def __init__(self, folder: str, step_s: float = 0.005) -> None:
        self._folder = Path(folder)
        self._step_s = step_s

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._step_s)

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with open(self._folder / f"{trainer.current_epoch}-{os.getpid()}", "a") as file:
            file.write("".join(f"{index}\n" for index in batch[2].tolist()))


def _number() -> int:
    return int(os.environ["RANK"])


def _epoch(folder: Path, epoch: int) -> Counter[int]:
    """How often each sample was taken."""
    files = list(folder.glob(f"{epoch}-*"))
    return Counter(int(line) for file in files for line in file.read_text().split())


def _scheduled(module: Any) -> Any:
    adam = Adam(module.parameters(), lr=0.01)
    return {"optimizer": adam, "lr_scheduler": {"scheduler": LambdaLR(adam, lambda moves: 0.9999**moves), "interval": "step"}}


def _fit(
    folder: str,
    *callbacks: Any,
    epochs: int = 3,
    step_s: float = 0.005,
    workers: int = 3,
    trainer_options: dict[str, Any] | None = None,
    then: Callable[[Any, Any], dict[str, Any]] = lambda t, model: {},
    data: LightningDataModule | None = None,
    **options: Any,
) -> dict[str, Any]:
    seed_everything(0)
    strategy = ADPSGDStrategy(**{"peer_timeout_s": 6.0, **options})
    made = [*callbacks, Steps(folder, step_s), ModelCheckpoint(folder, save_last=True)]
    t = trainer(max_epochs=epochs, strategy=strategy, callbacks=made, devices=workers, **(trainer_options or {}))
    model = Net(make_optimizer=_scheduled)
    if data is None:
        t.fit(model, loader(SAMPLES, 4), loader(32, 4, shuffle=False))
    else:
        t.fit(model, datamodule=data)
    result = {
        "epochs": t.current_epoch,
        "model": flat(model).tolist(),
        "world_size": t.world_size,
        "ranks": [worker.rank for worker in strategy.report.workers],
        "lost": strategy.report.lost,
        "accuracy": t.callback_metrics["val_acc"].item(),
        "moves": t.lr_scheduler_configs[0].scheduler.last_epoch,
        "momentum": sum(float(state["exp_avg"].norm()) for state in t.optimizers[0].state.values()),
    }
    return {**result, **then(t, model)}


class Validations(Callback):
    """The samples of each."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []

    def on_validation_start(self, *_: Any) -> None:
        self.made.append([])

    def on_validation_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.made[-1] += batch[2].tolist()


def _killed_with_static_shares(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    validations = Validations()
    result = _fit(folder, Killed(2, *HOOKS["inside the epoch"]), validations, work_sharing=False, trainer_options=options)
    return {**result, "validations": validations.made}


def _killed(folder: str, rank: int, where: str, options: dict[str, Any]) -> dict[str, Any]:
    return _fit(folder, Killed(rank, *HOOKS[where]), **options)


def _check(results: list[dict[str, Any]], folder: Path, *, lost: list[int], epochs: int = 3, workers: int = 3) -> None:
    left = [rank for rank in range(workers) if rank not in lost]
    for result in results:
        assert result["epochs"] == epochs
        assert result["model"] == results[0]["model"]
        assert result["accuracy"] == results[0]["accuracy"]
        assert result["moves"] == results[0]["moves"]
        assert (result["world_size"], result["ranks"], result["lost"]) == (len(left), left, lost)
    state = torch.load(folder / "last.ckpt", weights_only=False)
    assert state["epoch"] == epochs - 1


@pytest.mark.parametrize(
    "where",
    [
        "during setup",
        pytest.param("inside the epoch", marks=pytest.mark.slow),
        pytest.param("before the first exchange", marks=pytest.mark.slow),
        pytest.param("during a validation", marks=pytest.mark.slow),
        "between validation and checkpoint",
        pytest.param("when the epoch has ended", marks=pytest.mark.slow),
        pytest.param("when the next one begins", marks=pytest.mark.slow),
    ],
)
def test_the_others_end_every_epoch_when_a_worker_is_killed(where: str, tmp_path: Path) -> None:
    with job(_killed, str(tmp_path), 2, where, {}, workers=3) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert dict(outcomes)[2] == DIED
    _check(survivors(outcomes), tmp_path, lost=[2])
    for epoch in range(3):
        taken = _epoch(tmp_path, epoch)
        assert set(taken) == set(range(SAMPLES)), f"epoch {epoch}"
        # the batch under way when it was killed, and none that it had noted as finished
        assert sum(taken.values()) <= SAMPLES + 4


def _two_killed(folder: str) -> dict[str, Any]:
    killed = (Killed(6, *HOOKS["before the first exchange"]), Killed(3, *HOOKS["inside the epoch"], after=0))
    return _fit(folder, *killed, workers=8)


@pytest.mark.slow
def test_the_others_end_every_epoch_when_two_of_eight_are_killed_before_the_first_exchange_and_in_an_epoch(
    tmp_path: Path,
) -> None:
    with job(_two_killed, str(tmp_path), workers=8) as running:
        running.start_all()
        outcomes = dict(running.outcomes())
    assert outcomes[6] == outcomes[3] == DIED
    _check(survivors(list(outcomes.items())), tmp_path, lost=[6, 3], workers=8)
    for epoch in range(3):
        assert set(_epoch(tmp_path, epoch)) == set(range(SAMPLES)), f"epoch {epoch}"


@pytest.mark.parametrize("options", [{}, pytest.param({"val_check_interval": 0.5}, marks=pytest.mark.slow)])
def test_static_shares_are_the_survivors_after_a_death(options: dict[str, Any], tmp_path: Path) -> None:
    with job(_killed_with_static_shares, str(tmp_path), options, workers=3) as running:
        running.start_all()
        results = survivors(running.outcomes())
    _check(results, tmp_path, lost=[2])
    assert results[0]["moves"] == 3 * MOVES
    for epoch in range(3):
        taken = _epoch(tmp_path, epoch)
        assert set(taken) == set(range(SAMPLES)), f"epoch {epoch}"
    assert [len(result["validations"]) for result in results] == ([6, 6] if options else [3, 3])
    for made in list(zip(*(result["validations"] for result in results), strict=True))[-2:]:
        assert sorted(sample for theirs in made for sample in theirs) == list(range(32))  # by those who are left


@pytest.mark.slow
def test_a_limit_of_batches_holds_after_a_death(tmp_path: Path) -> None:
    with job(_killed_with_static_shares, str(tmp_path), {"limit_train_batches": 10}, workers=3) as running:
        running.start_all()
        results = survivors(running.outcomes())
    _check(results, tmp_path, lost=[2])
    assert sum(_epoch(tmp_path, 1).values()) <= 3 * 10 * 4
    assert sum(_epoch(tmp_path, 2).values()) == 2 * 10 * 4
    assert [len(result["validations"]) for result in results] == [3, 3]


@pytest.mark.parametrize(
    "where", ["between validation and checkpoint", pytest.param("inside the epoch", marks=pytest.mark.slow)]
)
def test_rank_0_is_survived_when_the_store_lives_elsewhere(where: str, tmp_path: Path) -> None:
    with store() as address, job(_killed, str(tmp_path), 0, where, {"store": address}, workers=3) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert dict(outcomes)[0] == DIED
    _check(survivors(outcomes), tmp_path, lost=[0])
    assert set(_epoch(tmp_path, 2)) == set(range(SAMPLES))


@pytest.mark.parametrize(
    "where",
    [
        "inside the epoch",
        pytest.param("during setup", marks=pytest.mark.slow),
        pytest.param("before the first exchange", marks=pytest.mark.slow),
        pytest.param("during a validation", marks=pytest.mark.slow),
        pytest.param("between validation and checkpoint", marks=pytest.mark.slow),
        pytest.param("when the epoch has ended", marks=pytest.mark.slow),
        pytest.param("when the next one begins", marks=pytest.mark.slow),
    ],
)
def test_rank_0_is_survived_with_the_store_that_it_holds(where: str, tmp_path: Path) -> None:
    with job(_killed, str(tmp_path), 0, where, {}, workers=3) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert dict(outcomes)[0] == DIED
    _check(survivors(outcomes), tmp_path, lost=[0])
    for epoch in range(3):
        taken = _epoch(tmp_path, epoch)
        assert set(taken) == set(range(SAMPLES)), f"epoch {epoch}"
        # the batch under way, and one that was trained on and not noted yet
        assert sum(taken.values()) <= SAMPLES + 8


@pytest.mark.slow
def test_the_last_of_two_goes_on_when_the_first_is_killed(tmp_path: Path) -> None:
    with job(_killed, str(tmp_path), 0, "inside the epoch", {"workers": 2}, workers=2) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert dict(outcomes)[0] == DIED
    _check(survivors(outcomes), tmp_path, lost=[0], workers=2)


@pytest.mark.slow
def test_a_new_rank_0_writes_on_in_the_metrics_of_the_old_one(tmp_path: Path) -> None:
    with store() as address, job(_killed_while_it_logs, str(tmp_path), {"store": address}, workers=3) as running:
        running.start_all()
        survivors(running.outcomes())
    with open(tmp_path / "csv" / "version_0" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["epoch"]) for row in rows} == {0, 1, 2}


def _killed_while_it_logs(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    logger = CSVLogger(folder, name="csv")
    logging: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    return _fit(folder, Killed(0, *HOOKS["inside the epoch"]), trainer_options=logging, **options)


def _fails(folder: str) -> dict[str, Any]:
    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            if _number() == 2 and (trainer.current_epoch, batch_idx) == (1, 2):
                raise ArithmeticError("no")

    return _fit(folder, Failing(), step_s=0.2, work_sharing=False)


@pytest.mark.slow
def test_an_exception_ends_the_others_inside_the_epoch(tmp_path: Path) -> None:
    with job(_fails, str(tmp_path), workers=3) as running:
        running.start_all()
        outcomes = dict(running.outcomes())
    assert all("Rank 2 has failed" in outcomes[rank] for rank in (0, 1))
    assert len(_epoch(tmp_path, 1)) < SAMPLES / 2


@pytest.mark.slow
def test_a_worker_that_dies_between_two_uses_of_a_trainer_is_survived(tmp_path: Path) -> None:
    with job(_dies_before_the_test, str(tmp_path), workers=3) as running:
        running.start_all()
        results = survivors(running.outcomes())
    assert [result["world_size"] for result in results] == [2, 2]
    assert results[0]["test"] == results[1]["test"]


def _dies_before_the_test(folder: str) -> dict[str, Any]:
    def then(t: Any, model: Any) -> dict[str, Any]:
        if _number() == 2:
            kill_myself()
        test = t.test(model, loader(32, 4, shuffle=False), verbose=False)
        return {"test": test, "world_size": t.world_size}

    return _fit(folder, then=then)


def _killed_in_a_long_epoch(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return _fit(folder, Killed(2, *HOOKS["inside the epoch"]), step_s=0.1, **options)


@pytest.mark.parametrize("options", [{"min_workers": 3}, {"on_peer_failure": "raise"}])
def test_all_end_when_too_few_are_left_or_none_may_die(options: dict[str, Any], tmp_path: Path) -> None:
    with job(_killed_in_a_long_epoch, str(tmp_path), options, workers=3) as running:
        running.start_all()
        outcomes = dict(running.outcomes())
    assert outcomes[2] == DIED
    if options == {"on_peer_failure": "raise"}:
        assert len(_epoch(tmp_path, 1)) < SAMPLES  # inside the epoch
    assert all("PeerError" in outcomes[rank] for rank in (0, 1)), outcomes
    assert "ank 2" in outcomes[0]
    assert "ank 2" in outcomes[1] or "The store of the job does not answer" in outcomes[1]  # rank 0 has it, and may end first


def _killed_while_groups_are_made(folder: str, options: dict[str, Any]) -> tuple[str, float]:
    """Rank 1 comes to the barrier before the groups, and not into them."""
    gloo_group.GROUP_S = 2.0
    strategy = ADPSGDStrategy(timeout=timedelta(seconds=60), **options)
    if _number() == 1:
        strategy.algorithm = lambda timeline: kill_myself()  # type: ignore[assignment, method-assign, func-returns-value]
    t = trainer(strategy=strategy, max_epochs=2)
    began_s = time.monotonic()
    try:
        t.fit(Net(), loader(160, 8))
        said = "trained"
    except PeerError as error:
        said = f"PeerError: {error}"
    return said, time.monotonic() - began_s


@pytest.mark.parametrize("options", [{"on_peer_failure": "raise"}, pytest.param({}, marks=pytest.mark.slow)])
def test_a_worker_that_dies_while_groups_are_made_is_not_waited_for_as_long_as_an_exchange_may_take(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with job(_killed_while_groups_are_made, str(tmp_path), options, workers=3) as running:
        running.start_all()
        ends = survivors(running.outcomes())
    assert all(said.startswith("PeerError" if options else "trained") for said, _ in ends), ends
    assert all(seconds < 25 for _, seconds in ends), ends


def _killed_before_it_begins(rank: int) -> None:
    if _number() == rank:
        kill_myself()
    t = trainer(strategy=ADPSGDStrategy(timeout=timedelta(seconds=2)), max_epochs=1)
    with pytest.raises(PeerError):
        t.fit(Net(), loader(160, 8))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_never_comes_ends_the_others_with_a_peer_error(rank: int) -> None:
    with job(_killed_before_it_begins, rank, workers=2) as running:
        running.start_all()
        survivors(running.outcomes())


def _until_it_is_back(folder: str, rank: int, workers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 2 is killed in its first life; all train on until as many have met as the test says."""

    class Patient(Callback):
        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            if trainer.current_epoch > 2 and trainer.world_size == workers:
                trainer.should_stop = True

    first_life = not Path(folder, "killed").exists()
    callbacks: list[Callback] = [Patient()]
    if _number() == rank and first_life:
        Path(folder, "killed").touch()
        callbacks.append(Killed(rank, *HOOKS["inside the epoch"]))
    return _fit(folder, *callbacks, epochs=400, **options)


@pytest.mark.parametrize("new_rank", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_that_comes_back_or_a_new_one_is_taken_in_and_ends_with_the_same_model(new_rank: int, tmp_path: Path) -> None:
    with job(_until_it_is_back, str(tmp_path), 2, 3, {"max_workers": 4}, workers=3) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pids[2])], timeout=40)
        running.start(new_rank)
        outcomes = running.outcomes()
    results = survivors(outcomes)
    assert len(results) == 3
    for result in results:
        assert result["model"] == results[0]["model"]
        assert result["ranks"] == [0, 1, new_rank]
        assert result["epochs"] == results[0]["epochs"]
        assert result["moves"] == result["epochs"] * MOVES
        assert result["momentum"] > 0
    for epoch in (0, results[0]["epochs"] - 1):
        assert set(_epoch(tmp_path, epoch)) == set(range(SAMPLES))


class _WayBack(logging.Handler):
    """Writes down the port by which others come back, as the log of a worker says it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if said := re.search(r"MASTER_ADDR=127.0.0.1 MASTER_PORT=(\d+)", record.getMessage()):
            unfinished = Path(self._folder, f"unfinished-{_number()}")
            unfinished.write_text(said.group(1))
            unfinished.rename(Path(self._folder, f"way-back-{_number()}"))


def _until_rank_0_is_back(folder: str) -> dict[str, Any]:
    logging.getLogger("lightning_gossip.runtime.membership.monitor").addHandler(_WayBack(folder))
    return _until_it_is_back(folder, 0, 3, {})


@pytest.mark.slow
@pytest.mark.parametrize("by", [1, 2])
def test_rank_0_comes_back_by_the_address_of_any_other_worker(by: int, tmp_path: Path) -> None:
    with job(_until_rank_0_is_back, str(tmp_path), workers=3) as running:
        running.start_all()
        way_back = tmp_path / f"way-back-{by}"
        assert eventually(way_back.exists, 60.0)
        running.start(0, port=int(way_back.read_text()))
        outcomes = running.outcomes(120.0)
    results = survivors(outcomes)
    assert len(results) == 3
    for result in results:
        assert result["model"] == results[0]["model"]
        assert result["ranks"] == [1, 2, 0]
    assert set(_epoch(tmp_path, results[0]["epochs"] - 1)) == set(range(SAMPLES))


class Growing(LightningDataModule):
    """A data set that grows in each of the first epochs."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(SAMPLES + 4 * min(self.trainer.current_epoch, 20), 4)

    def val_dataloader(self) -> Any:
        return loader(32, 4, shuffle=False)


def _until_it_is_back_in_grown_data(folder: str) -> dict[str, Any]:
    return _until_it_is_back(folder, 2, 3, {"data": Growing(), "trainer_options": {"reload_dataloaders_every_n_epochs": 1}})


@pytest.mark.slow
def test_one_that_comes_later_reads_the_data_of_its_first_epoch(tmp_path: Path) -> None:
    with job(_until_it_is_back_in_grown_data, str(tmp_path), workers=3) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pids[2])], timeout=40)
        running.start(2)
        results = survivors(running.outcomes())
    assert len(results) == 3
    assert all(result["model"] == results[0]["model"] for result in results)
    last = results[0]["epochs"] - 1
    for epoch in (0, last):
        assert set(_epoch(tmp_path, epoch)) == set(range(SAMPLES + 4 * min(epoch, 20)))


def _until_it_thaws(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    class Frozen(Callback):
        lonely = 0

        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            if _number() == 2 and (trainer.current_epoch, batch_idx) == (1, 5):
                Path(folder, "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)

        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            self.lonely += trainer.world_size == 2
            if self.lonely == 2 and trainer.is_global_zero:  # the others have done a whole epoch without it
                os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
            if trainer.world_size == 3 and trainer.strategy.report.lost == [2]:
                trainer.should_stop = True

    return _fit(folder, Frozen(), epochs=400, step_s=0.03, **options)


def test_a_worker_that_was_frozen_for_long_is_taken_in_again(tmp_path: Path) -> None:
    with job(_until_it_thaws, str(tmp_path), {"peer_timeout_s": 3.0}, workers=3) as running:
        running.start_all()
        outcomes = running.outcomes()
    results = survivors(outcomes)
    for result in results:
        assert result["model"] == results[0]["model"]
        assert (result["ranks"], result["lost"]) == ([0, 1, 2], [2])
