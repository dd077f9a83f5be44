"""Outer steps of islands: each rank makes them on its own part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gossip import ADPSGDStrategy, Outer, PeriodicAveragingStrategy, ShardedADPSGDStrategy
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer
from tests.strategies.test_outer import PERIOD, STEPS, by_hand, fit_own, network, whole
from tests.strategies.test_sharded import ShardedNet

pytestmark = pytest.mark.processes


class InShards(ShardedNet):
    """The model of :func:`network`."""

    def __init__(self) -> None:
        plain = network()
        super().__init__(plain._make_optimizer, plain.network)


def diloco(**options: Any) -> PeriodicAveragingStrategy:
    return PeriodicAveragingStrategy(period=PERIOD, outer=Outer(0.7, 0.9), timeout=60.0, **options)


def noloco(**options: Any) -> ADPSGDStrategy:
    return ADPSGDStrategy(local_steps=PERIOD, outer=Outer(0.7, 0.6), timeout=60.0, **{"dense_share": 0.0, **options})


def sharded_noloco(data: int = 2, **options: Any) -> ShardedADPSGDStrategy:
    return ShardedADPSGDStrategy(
        data_parallel_size=data, local_steps=PERIOD, outer=Outer(0.7, 0.6), dense_share=0.0, timeout=60.0, **options
    )


# -- identities --------------------------------------------------------------------------------------------------------------


def _fit(strategy: Any) -> Any:
    return fit_own(strategy, InShards() if isinstance(strategy, ShardedADPSGDStrategy) else network())


@pytest.mark.parametrize(
    ("strategy", "islands"),
    [
        pytest.param(diloco(island=2), 2, id="DiLoCo, two islands"),
        pytest.param(diloco(island=2, overlap=2), 2, id="DiLoCo, two islands, overlapped", marks=pytest.mark.slow),
        pytest.param(diloco(island=2), 1, id="DiLoCo, one island", marks=pytest.mark.slow),
        pytest.param(noloco(island=2), 1, id="NoLoCo, one island", marks=pytest.mark.slow),
        pytest.param(sharded_noloco(), 1, id="NoLoCo, one island in shards", marks=pytest.mark.slow),
    ],
)
def test_islands_are_workers_of_their_ranks_batches(strategy: Any, islands: int) -> None:
    """k ranks of an island are one worker with k times the batch, in a loop of a few lines."""
    results = launch(_fit, strategy, workers=2 * islands, timeout_s=180.0)
    assert all(result == results[0] for result in results)
    late = 2 if getattr(strategy, "averaging", None) is not None and strategy.averaging.overlap else 0
    expected = by_hand(strategy.outer, late=late, workers=islands, ranks_of_worker=2)
    without = by_hand(Outer(1.0, 0.0), late=late, workers=islands, ranks_of_worker=2)
    start, ours = flat(network().network), torch.tensor(results[0][0])
    scale = (expected - start).abs().max()
    assert (ours - expected).abs().max() < 1e-5 * scale
    assert (ours - without).abs().max() > 1e-2 * scale
    if islands == 2:
        assert results[0][1] == STEPS // PERIOD + 1  # averagings


# -- gossip ------------------------------------------------------------------------------------------------------------------


class Boundaries(Callback):
    """The model after each batch."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        self.seen.append(whole(model))


def _gossip(options: dict[str, Any]) -> Any:
    seed_everything(2)
    boundaries = Boundaries()
    strategy = noloco(island=2, exchanges_per_step=0.34, **options)
    fit = trainer(strategy=strategy, max_epochs=3, callbacks=[boundaries])
    fit.fit(Net(), loader(203), loader(50, shuffle=False))
    return boundaries.seen, [worker.exchanges for worker in strategy.report.workers], float(fit.callback_metrics["val_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"wire": "int8", "dense_share": 0.3}])
def test_ranks_of_an_island_have_one_model_after_each_outer_step(options: dict[str, Any]) -> None:
    """It comes between the steps at which an island hands round: every third, and rounds are of four."""
    ranks = launch(_gossip, options, workers=4)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[2][0] == ranks[3][0]
    assert ranks[0][0] != ranks[2][0][: len(ranks[0][0])]
    assert all(exchanges > 0 for exchanges in ranks[0][1])
    assert ranks[0][2] < 0.5


def _accelerated(island: int) -> Any:
    seed_everything(2)
    boundaries = Boundaries()
    strategy = ADPSGDStrategy(island=island, a2cid2=True, exchanges_per_step=0.34, timeout=60.0)
    fit = trainer(strategy=strategy, max_epochs=3, callbacks=[boundaries])
    fit.fit(Net(), loader(203), loader(50, shuffle=False))
    return boundaries.seen, [worker.exchanges for worker in strategy.report.workers], float(fit.callback_metrics["val_loss"])


@pytest.mark.parametrize("island", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_an_island_have_one_model_while_a_second_copy_moves_it(island: int) -> None:
    """At each step, and not only where there was an exchange."""
    ranks = launch(_accelerated, island, workers=2 * island)
    assert ranks[0][0] == ranks[island - 1][0]
    assert ranks[island][0] == ranks[-1][0]
    assert all(exchanges > 0 for exchanges in ranks[0][1])
    assert ranks[0][2] < 0.5


# -- checkpoints -------------------------------------------------------------------------------------------------------------


class Kept(Callback):
    """What φ, v and the parameters are before the first step of a fit, of the whole model."""

    found: dict[str, list[float]]

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if not hasattr(self, "found"):
            algorithm, model = trainer.strategy._fit._algorithm, trainer.strategy._fit._model
            state = getattr(algorithm, "_outer_state", None) or algorithm._local_steps.state
            states = model.whole(state.state_dict(), state.KINDS)
            self.found = {key: full(value).flatten().tolist() for key, value in states.items()}
            self.found["x"] = whole(trainer.lightning_module.network)


def full(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def _strategy(kind: str, size: int) -> Any:
    match kind:
        case "diloco":
            return diloco(island=size)
        case "noloco":
            return noloco(island=size)
        case "shards":
            return sharded_noloco(size)
        case _:
            return sharded_noloco(size, save_distributed_checkpoint=False)


def _model(kind: str) -> Net:
    return network() if "loco" in kind else InShards()


def _save(kind: str, folder: str) -> Any:
    """An epoch of ten steps an island, in rounds of four."""
    seed_everything(1)
    saver = ModelCheckpoint(dirpath=folder, filename="last", enable_version_counter=False)
    fit = trainer(strategy=_strategy(kind, 2), max_epochs=1, callbacks=[saver])
    fit.fit(_model(kind), loader(10 * 4 * 8, 8, shuffle=False))
    return saver.best_model_path


def _go_on(kind: str, size: int, path: str) -> Any:
    seed_everything(1)
    kept = Kept()
    fit = trainer(strategy=_strategy(kind, size), max_epochs=2, callbacks=[kept])
    model = _model(kind)
    fit.fit(model, loader(10 * 4 * 8, 8, shuffle=False), ckpt_path=path)
    return kept.found, whole(model.network)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diloco", "noloco", "shards", "one file"])
def test_the_outer_state_of_islands_goes_on_in_islands_of_any_size(tmp_path: Path, kind: str) -> None:
    path = launch(_save, kind, str(tmp_path), workers=4, timeout_s=180.0)[0]
    if kind in ("diloco", "noloco"):
        saved = torch.load(path, weights_only=False)["lightning_gossip"]["tensors"]
        names = [name for name, _ in network().named_parameters()]
        assert sorted(saved) == sorted(f"{of}/{name}" for of in ("slow", "velocity") for name in names)
        assert all(saved[f"velocity/{name}"].abs().sum() > 0 for name in names)
    found = {}
    for size, workers in ((2, 4), (1, 2), (2, 2)):
        results = launch(_go_on, kind, size, path, workers=workers, timeout_s=180.0)
        found[size, workers] = results[0][0]
        assert all(result[1] == results[0][1] for result in results)
        if kind in ("diloco", "noloco"):
            for key, value in saved.items():
                theirs = torch.tensor(found[size, workers][key])
                if key.startswith("velocity") or kind == "diloco":  # φ follows merges under gossip
                    assert torch.allclose(theirs, value.flatten(), atol=1e-6), key
    for velocities in found.values():
        for key, value in velocities.items():
            if key.startswith("velocity") or key == "x":
                assert value == pytest.approx(found[2, 4][key], abs=1e-6)
                assert any(value)
