"""Islands whose store is lost with the island that holds it: the others go on at another island's."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.runtime.cluster import eventually
from tests.strategies.jobs import DIED, job, survivors
from tests.strategies.models import Net, flat, loader, trainer
from tests.strategies.test_islands import islands
from tests.strategies.test_sharded import ShardedNet, sharded, whole
from tests.strategies.test_survival import Steps, _epoch, _WayBack

pytestmark = pytest.mark.processes
SAMPLES, BATCH = 403, 4  # 101 batches: 50 groups of two, the last one cut anew
EPOCHS = 3


class Struck(Callback):
    """A signal to each of some ranks, in the fifth batch after the first epoch, when four are noted as finished."""

    def __init__(self, ranks: tuple[int, ...], signal_number: int) -> None:
        self._ranks, self._signal = ranks, signal_number
        self._batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batches += trainer.current_epoch > 0
        if int(os.environ["RANK"]) in self._ranks and self._batches == 5:
            os.kill(os.getpid(), self._signal)


def _train(folder: str, kind: str, ranks: tuple[int, ...], signal_number: int, options: dict[str, Any]) -> dict[str, Any]:
    seed_everything(1)
    strategy: Any = (sharded if kind == "sharded" else islands)(**{"peer_timeout_s": 5.0, **options})
    model = ShardedNet() if kind == "sharded" else Net()
    saver = ModelCheckpoint(folder, save_last=True)
    step_s = 0.005 if int(os.environ["RANK"]) < 2 else 0.03  # the island that is struck takes some batches of the epoch
    fit = trainer(strategy=strategy, callbacks=[Struck(ranks, signal_number), Steps(folder, step_s), saver], max_epochs=EPOCHS)
    began_s = time.monotonic()
    fit.fit(model, loader(SAMPLES, BATCH), loader(50, shuffle=False))
    return {
        "seconds": time.monotonic() - began_s,
        "model": whole(model) if kind == "sharded" else flat(model).numpy(),
        "ranks": (fit.global_rank, fit.world_size),
        "island": (dist.get_rank(), dist.get_world_size()),
        "epochs": fit.current_epoch,
        "lost": strategy.report.lost,
        "loss": float(fit.callback_metrics["val_loss"]),
        "last": saver.last_model_path,
    }


def _check(left: list[dict[str, Any]], folder: Path, *, lost: int, islands: int = 3) -> None:
    assert [outcome["ranks"] for outcome in left] == [(rank, 2 * islands - 2) for rank in range(2 * islands - 2)]
    for outcome in left:
        assert (outcome["epochs"], outcome["lost"]) == (EPOCHS, [lost])
        assert outcome["island"] == (outcome["ranks"][0] % 2, 2)
        assert np.array_equal(outcome["model"], left[0]["model"])
        assert outcome["loss"] == left[0]["loss"]
    for epoch in range(EPOCHS):
        taken = _epoch(folder, epoch)
        assert set(taken) == set(range(SAMPLES)), f"epoch {epoch}"
        # only what the killed one had begun may come twice
        assert sum(taken.values()) <= SAMPLES + 1 + (epoch > 0) * 4 * BATCH
    last = Path(left[0]["last"])
    assert last == folder / "last.ckpt"
    assert np.array_equal(_saved(last, folder), left[0]["model"])


def _saved(path: Path, folder: Path) -> Any:
    """The model of a checkpoint, as one vector."""
    if path.is_dir():
        dcp_to_torch_save(path, folder / "whole.pt")
        state = torch.load(folder / "whole.pt", weights_only=False)["state_dict"]
        return torch.cat([state[name].reshape(-1) for name, _ in Net().named_parameters()]).numpy()
    plain = Net()
    plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    return flat(plain).numpy()


NODE, HOLDER, MATE = (0, 1), (0,), (1,)


@pytest.mark.parametrize(
    ("kind", "ranks", "signal_number"),
    [
        pytest.param("replicated", NODE, signal.SIGKILL, id="replicated, the node"),
        pytest.param("replicated", HOLDER, signal.SIGKILL, id="replicated, the rank that holds it", marks=pytest.mark.slow),
        pytest.param("replicated", MATE, signal.SIGKILL, id="replicated, a mate of that", marks=pytest.mark.slow),
        pytest.param("sharded", NODE, signal.SIGKILL, id="sharded, the node", marks=pytest.mark.slow),
        pytest.param("sharded", HOLDER, signal.SIGKILL, id="sharded, the rank that holds it", marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_when_the_island_with_the_store_is_killed(
    kind: str, ranks: tuple[int, ...], signal_number: int, tmp_path: Path
) -> None:
    with job(_train, str(tmp_path), kind, ranks, int(signal_number), {}, workers=6) as running:
        running.start_all()
        outcomes = running.outcomes(timeout_s=240.0)
    assert [rank for rank, outcome in outcomes if outcome == DIED] == [0, 1]
    _check(survivors(outcomes), tmp_path, lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_an_island_of_which_a_rank_freezes_takes_the_store_with_it_and_the_others_go_on(kind: str, tmp_path: Path) -> None:
    with job(_train, str(tmp_path), kind, MATE, int(signal.SIGSTOP), {}, workers=6) as running:
        pids = running.start_all()
        ends = running.ends(timeout_s=120.0, frozen=MATE)
        os.kill(pids[1], signal.SIGKILL)
    assert [end.how for end in ends] == ["died", "late", "told", "told", "told", "told"], [end.value for end in ends]
    _check([end.value for end in ends[2:]], tmp_path, lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_of_two_islands_the_other_one_goes_on_when_the_processes_with_the_store_have_ended(kind: str, tmp_path: Path) -> None:
    with job(_train, str(tmp_path), kind, NODE, int(signal.SIGKILL), {}, workers=4) as running:
        running.start_all()
        outcomes = running.outcomes(timeout_s=240.0)
    _check(survivors(outcomes), tmp_path, lost=0, islands=2)


class InFirstLife(Struck):
    """The same, and not when the rank has come back."""

    def __init__(self, folder: str) -> None:
        life = Path(folder, f"life-{os.environ['RANK']}")
        super().__init__(() if life.exists() else NODE, signal.SIGKILL)
        life.touch()


class AllSix(Callback):
    """Ends the fit when all are there, after an epoch that the island which has come back has trained in."""

    def __init__(self) -> None:
        self._whole = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._whole += trainer.current_epoch > 1 and trainer.world_size == 6
        trainer.should_stop |= self._whole > 1


def _until_all_are_back(folder: str, kind: str) -> dict[str, Any]:
    logging.getLogger("lightning_gossip.runtime.membership.monitor").addHandler(_WayBack(folder))
    seed_everything(1)
    strategy: Any = (sharded if kind == "sharded" else islands)(peer_timeout_s=5.0)
    model = ShardedNet() if kind == "sharded" else Net()
    fit = trainer(strategy=strategy, callbacks=[AllSix(), InFirstLife(folder), Steps(folder)], max_epochs=2000)
    fit.fit(model, loader(SAMPLES, BATCH))
    return {
        "initial": int(os.environ["RANK"]),
        "rank": fit.global_rank,
        "epochs": fit.current_epoch,
        "model": whole(model) if kind == "sharded" else flat(model).numpy(),
        "island": (dist.get_rank(), dist.get_world_size()),
        "steps": [worker.steps for worker in strategy.report.workers],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_the_island_that_held_the_store_comes_back_by_the_address_of_another(kind: str, tmp_path: Path) -> None:
    with job(_until_all_are_back, str(tmp_path), kind, workers=6) as running:
        running.start_all()
        way_back = tmp_path / "way-back-2"
        assert eventually(way_back.exists, 90.0)
        for rank in NODE:
            running.start(rank, port=int(way_back.read_text()))
        left = survivors(running.outcomes(90.0))
    assert sorted(outcome["rank"] for outcome in left) == list(range(6))
    for outcome in left:
        assert outcome["epochs"] == left[0]["epochs"]
        assert outcome["island"] == (outcome["initial"] % 2, 2)
        assert np.array_equal(outcome["model"], left[0]["model"])
        assert len(outcome["steps"]) == 3
        assert min(outcome["steps"]) > 0
    assert {outcome["initial"]: outcome["rank"] for outcome in left} == {0: 4, 1: 5, 2: 0, 3: 1, 4: 2, 5: 3}
    assert set(_epoch(tmp_path, left[0]["epochs"] - 1)) == set(range(SAMPLES))
