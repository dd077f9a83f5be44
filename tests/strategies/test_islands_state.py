"""Islands: models that are not finite, averaged optimizer states, and a checkpoint of each island's own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gossip import ADPSGDStrategy, Outer, PeriodicAveragingStrategy, ShardedADPSGDStrategy
from tests.strategies.launch import launch
from tests.strategies.models import OPTIMIZERS, Net, loader, trainer
from tests.strategies.test_outer import whole
from tests.strategies.test_sharded import ShardedNet

pytestmark = pytest.mark.processes

# -- a model that is not finite ----------------------------------------------------------------------------------------------


class Poisoned(Callback):
    """Part of rank 1's model becomes NaN after a step of the first epoch, and so of one rank of its island alone."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.cluster_environment.global_rank() == 1 and (trainer.current_epoch, batch_idx) == (0, 3):
            with torch.no_grad():
                trainer.strategy._fit._model.tensors[0].view(-1)[0] = float("nan")


def _ill(strategy: Any, is_sharded: bool) -> Any:
    seed_everything(1)
    model: Any = ShardedNet() if is_sharded else Net()
    fit = trainer(strategy=strategy, max_epochs=2, callbacks=[Poisoned()])
    try:
        fit.fit(model, loader(803), loader(32, shuffle=False))
    except (ArithmeticError, RuntimeError) as stopped:  # a mate's may be one of the network
        return f"{type(stopped).__name__}: {stopped}"
    report = fit.strategy.report
    return {
        "model": whole(model.network),
        "adopted": [worker.adopted for worker in report.workers],
        "loss": float(fit.callback_metrics["val_loss"]),
    }


def gossip(**options: Any) -> ADPSGDStrategy:
    return ADPSGDStrategy(island=2, work_sharing=False, timeout=60.0, **options)


def in_shards(**options: Any) -> ShardedADPSGDStrategy:
    return ShardedADPSGDStrategy(data_parallel_size=2, work_sharing=False, timeout=60.0, **options)


OUTER: dict[str, Any] = {"outer": Outer(), "local_steps": 2, "exchanges_per_step": 1.0, "dense_share": 0.0}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(gossip(on_nonfinite="adopt"), id="in an exchange"),
        pytest.param(gossip(on_nonfinite="adopt", exchanges_per_step=0.0), id="at the rendezvous", marks=slow),
        pytest.param(gossip(on_nonfinite="adopt", at_rendezvous="evaluate"), id="evaluating", marks=slow),
        pytest.param(gossip(on_nonfinite="adopt", **OUTER), id="with outer steps", marks=slow),
        pytest.param(in_shards(on_nonfinite="adopt"), id="in shards", marks=slow),
    ],
)
def test_an_island_of_which_one_part_is_not_finite_goes_on_from_the_mean_of_the_others(strategy: Any) -> None:
    ranks = launch(_ill, strategy, isinstance(strategy, ShardedADPSGDStrategy), workers=4, timeout_s=120.0)
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    for rank in ranks:
        assert torch.isfinite(torch.tensor(rank["model"])).all()
        assert rank["model"] == ranks[0]["model"] or strategy.fit_options.at_rendezvous == "evaluate"
        assert rank["adopted"] == [2, 0]  # both ranks of the island, and of no other
        assert rank["loss"] < 0.7


@pytest.mark.slow
def test_or_all_end_and_a_rank_of_that_island_is_named() -> None:
    ranks = launch(_ill, gossip(), False, workers=4, timeout_s=120.0)
    assert any(rank.startswith("NonFiniteError: The model of rank ") for rank in ranks[:2])
    assert all(isinstance(rank, str) for rank in ranks)


# -- optimizer states --------------------------------------------------------------------------------------------------------


def _averaging(optimizer: str, overlap: bool) -> Any:
    seed_everything(2)
    strategy = PeriodicAveragingStrategy(
        island=2, period=5, optimizer_state="average", overlap=1 if overlap else False, timeout=60.0
    )
    model = Net(OPTIMIZERS[optimizer])
    fit = trainer(strategy=strategy, max_epochs=2)
    fit.fit(model, loader(203), loader(50, shuffle=False))
    states = fit.optimizers[0].state
    name = "momentum_buffer" if optimizer == "sgd" else "exp_avg_sq"
    return torch.cat([states[p][name].flatten() for p in model.parameters()]).tolist(), whole(model), model.seen


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "overlap"), [("adamw", False), ("sgd", True)])
def test_islands_average_the_states_of_optimizers_part_by_part(optimizer: str, overlap: bool) -> None:
    ranks = launch(_averaging, optimizer, overlap, workers=4)
    for state, model, _ in ranks:
        assert (state, model) == ranks[0][:2]
    assert any(ranks[0][0])
    assert ranks[0][2] != ranks[2][2]  # of other samples


# -- each island's own state -------------------------------------------------------------------------------------------------


class Watched(Callback):
    """The model after each batch, and a checkpoint after the second epoch."""

    def __init__(self) -> None:
        self.models: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        self.models.append(whole(model.network))


def _strategy(kind: str, size: int = 2) -> Any:
    options: dict[str, Any] = {"checkpoint": "replicas", "at_rendezvous": "evaluate", "timeout": 60.0}
    gossips = {"work_sharing": False, "exchanges_per_step": 0.0, **options}
    match kind:
        case "gossip":
            return ADPSGDStrategy(island=size, **gossips)
        case "outer":
            return ADPSGDStrategy(island=size, **{**OUTER, **gossips})
        case "averaging":
            return PeriodicAveragingStrategy(island=size, period=5, outer=Outer(0.7, 0.9), **options)
        case _:
            return ShardedADPSGDStrategy(data_parallel_size=size, **gossips)


def _epochs(kind: str, folder: str, size: int, path: str | None) -> Any:
    """Three epochs, with a checkpoint after each; or the third, from one. Nobody exchanges, so islands stay unlike."""
    seed_everything(1)
    model: Any = ShardedNet(OPTIMIZERS["adamw"]) if kind == "shards" else Net(OPTIMIZERS["adamw"])
    watched = Watched()
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    fit = trainer(strategy=_strategy(kind, size), max_epochs=3, callbacks=[watched, *([] if path else [saver])])
    fit.fit(model, loader(6 * 4 * 8, 8, shuffle=False), loader(50, shuffle=False), ckpt_path=path)
    return watched.models


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["averaging", "gossip", "outer", "shards"])
def test_islands_go_on_from_their_own_states(tmp_path: Path, kind: str) -> None:
    """To the bit: as if there had been no checkpoint. On another number of islands, from the mean."""
    whole_run = launch(_epochs, kind, str(tmp_path), 2, None, workers=4, timeout_s=180.0)
    path = tmp_path / "epoch=1.ckpt"
    files = sorted(file.name for file in (tmp_path / "epoch=1.ckpt.replicas").iterdir())
    assert files == [f"rank{rank}.pt" for rank in (range(4) if kind == "shards" else (0, 2))]
    resumed = launch(_epochs, kind, str(tmp_path / "other"), 2, str(path), workers=4, timeout_s=180.0)
    assert whole_run[0][-1] != whole_run[2][-1]
    for before, after in zip(whole_run, resumed, strict=True):
        assert len(after) == 6
        assert after == before[-6:]
    others = launch(_epochs, kind, str(tmp_path / "other"), 1, str(path), workers=2, timeout_s=180.0)
    assert all(torch.isfinite(torch.tensor(rank[-1])).all() for rank in others)
