"""Scripts that catch what ends a Trainer's work on all ranks, or on one, and train on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_gossip import ADPSGDStrategy
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes
SOON_S = 20.0  # of the longest fit: far less than any deadline of the strategies'


class Fails(Callback):
    """Raises in the first batch of one rank, which each is sure of, or in the validation of all."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "one" and trainer.global_rank == 1 and batch_idx == 0:
            raise ArithmeticError("a bad sample")

    def on_validation_end(self, trainer: Any, model: Any) -> None:
        if self.where == "all" and not trainer.sanity_checking:
            raise torch.OutOfMemoryError("it will not fit")

    def on_fit_end(self, trainer: Any, model: Any) -> None:
        if self.where == "late" and trainer.global_rank == 0:  # the others have ended well
            raise ArithmeticError("broken in the report")


def _trials(strategy: Any, trials: list[str], options: dict[str, Any]) -> list[Any]:
    ends: list[Any] = []
    for trial in trials:
        torch.manual_seed(0)
        model, began_s = Net(), time.monotonic()
        made = strategy if isinstance(strategy, str) else strategy(**options)
        try:
            trainer(strategy=made, callbacks=[Fails(trial)]).fit(model, loader(160, 8), loader(32, shuffle=False))
            ends.append(("trained", round(flat(model).sum().item(), 5)))
        except Exception as error:  # noqa: BLE001 - told to the test
            ends.append((type(error).__name__, time.monotonic() - began_s))
    return ends


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("adpsgd", {}, id="adpsgd"),
        pytest.param(ADPSGDStrategy, {"on_peer_failure": "raise"}, id="adpsgd-raise", marks=pytest.mark.slow),
        *(
            pytest.param(name, {}, id=name, marks=pytest.mark.slow)
            for name in ("dpsgd", "apsgd", "eamsgd", "periodic_averaging", "adaptive_averaging", "qsgd")
        ),
    ],
)
def test_a_script_that_catches_an_exception_trains_on(strategy: Any, options: dict[str, Any]) -> None:
    first, second = launch(_trials, strategy, ["one", "all", "no", "late", "one", "no"], options, timeout_s=150)
    said = [[end[0] for end in ends] for ends in (first, second)]
    assert said[0] == ["PeerError", "OutOfMemoryError", "trained", "ArithmeticError", "PeerError", "trained"]
    assert said[1] == ["ArithmeticError", "OutOfMemoryError", "trained", "trained", "ArithmeticError", "trained"]
    for trial in (2, 5):
        assert first[trial] == second[trial]
    assert all(seconds < SOON_S for said, seconds in (*first, *second) if said != "trained"), (first, second)


class RankZeroComputes(Callback):
    """Alone, for longer than an exchange may take, while the other waits for it: in a collective of each kind."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.made: list[Any] = []

    def on_validation_epoch_end(self, trainer: Any, model: Any) -> None:
        if trainer.sanity_checking:
            return
        ours, one = trainer.strategy, torch.tensor([float(trainer.global_rank)])
        for collective in (
            dist.barrier,
            ours.barrier,
            lambda: ours.broadcast(trainer.global_rank),
            lambda: ours.reduce(one, reduce_op="sum").item(),
            lambda: model.all_gather(one).flatten().tolist(),
        ):
            if trainer.global_rank == 0:
                time.sleep(self.seconds)
            self.made.append(collective())


def _waits() -> tuple[list[Any], int]:
    computes = RankZeroComputes(1.0)
    strategy = ADPSGDStrategy(exchange_timeout_s=0.4)
    trainer(strategy=strategy, callbacks=[computes], max_epochs=1).fit(Net(), loader(80, 8), loader(32, shuffle=False))
    return computes.made, strategy.members.generation


def test_an_exchanges_deadline_does_not_bound_a_users_collectives() -> None:
    assert launch(_waits) == [([None, None, 0, 1.0, [0.0, 1.0]], 0)] * 2


class Refused(Callback):
    """A collective that torch refuses, on all ranks."""

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        trainer.strategy.reduce(torch.ones(1), reduce_op=dist.ReduceOp.BAND)


def _refused(options: dict[str, Any]) -> tuple[str, float]:
    began_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        trainer(strategy=ADPSGDStrategy(**options), callbacks=[Refused()]).fit(Net(), loader(80, 8))
    return str(caught.value), time.monotonic() - began_s


@pytest.mark.parametrize("options", [{}, pytest.param({"on_peer_failure": "raise"}, marks=pytest.mark.slow)])
def test_a_collective_that_torch_refuses_is_refused_as_under_ddp(options: dict[str, Any]) -> None:
    for said, seconds in launch(_refused, options):
        assert said == "Cannot use ReduceOp.BAND with non-integral dtype"
        assert seconds < SOON_S
