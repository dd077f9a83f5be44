"""User code that raises on one rank, in any hook: every worker ends soon, the others with a PeerError, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_gossip import ADPSGDStrategy, APSGDStrategy, DPSGDStrategy, EAMSGDStrategy, PeerError
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from tests.strategies.jobs import job
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, samples, trainer

pytestmark = pytest.mark.processes
HOOKS = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "training_step",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
]
LONGEST_S = 20.0  # of one worker's end after another's failure


class Broken(Net):
    """Raises in one hook of one rank."""

    def __init__(self, hook: str, rank: int) -> None:
        super().__init__()
        self.broken = (hook, rank)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in HOOKS and name == super().__getattribute__("__dict__").get("broken", ("", 0))[0]:
            return self._raises(value)
        return value

    def _raises(self, hook: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Any:
            environment = self.trainer.strategy.cluster_environment
            if environment.global_rank() == self.broken[1] and not self.trainer.sanity_checking:
                raise ArithmeticError(f"broken in {self.broken[0]}")
            return hook(*args, **kwargs)

        return broken


class BadSample(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        if index == 77:
            raise ArithmeticError("broken in a loader process")
        return samples(160)[index]


def _left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gossip-") and t.name != "gossip-listener"]


def _fit(kind: Any, options: dict[str, Any], cases: list[tuple[str, int]]) -> list[tuple[str, float, list[str]]]:
    """One fit after the other in one process, each on fresh groups."""
    ends = []
    for hook, rank in cases:
        data = (
            torch.utils.data.DataLoader(BadSample(), batch_size=8, num_workers=1, multiprocessing_context="fork")
            if hook == "loader"
            else loader(160, 8)
        )
        t = trainer(strategy=kind(**options), enable_checkpointing=False)
        began_s = time.monotonic()
        try:
            t.fit(Broken(hook, rank), data, loader(32, shuffle=False))
            said = "trained"
        except Exception as error:  # noqa: BLE001 - told to the test
            said = f"{type(error).__name__}: {error}"
        ends.append((said, time.monotonic() - began_s, _left()))
        if dist.is_initialized():
            dist.destroy_process_group()
    return ends


STRATEGIES = {
    "adpsgd": (ADPSGDStrategy, {}),
    "adpsgd, raising": (ADPSGDStrategy, {"on_peer_failure": "raise"}),
    "apsgd": (APSGDStrategy, {}),
    "eamsgd": (EAMSGDStrategy, {"period": 2}),
    "dpsgd": (DPSGDStrategy, {}),
}


def check(hook: str, rank: int, ends: list[tuple[str, float, list[str]]]) -> None:
    for each, (said, seconds, left) in enumerate(ends):
        assert seconds < LONGEST_S, (hook, each, seconds)
        assert left == [], (hook, each, left)
        if each == rank:
            assert said.startswith("ArithmeticError: "), (hook, each, said)
        elif hook != "on_train_end" or said != "trained":  # then all have met for the last time
            assert said.startswith(PeerError.__name__), (hook, each, said)


QUICK = {
    ("adpsgd", "setup"),
    ("adpsgd", "training_step"),
    ("adpsgd", "on_train_epoch_end"),
    ("adpsgd, raising", "training_step"),
    ("adpsgd, raising", "validation_step"),
}


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        pytest.param(name, hook, marks=[] if (name, hook) in QUICK else pytest.mark.slow)
        for name in ("adpsgd", "adpsgd, raising")
        for hook in HOOKS
    ],
)
def test_an_exception_in_any_hook_of_rank_1_ends_all(name: str, hook: str) -> None:
    kind, options = STRATEGIES[name]
    check(hook, 1, [ends[0] for ends in launch(_fit, kind, options, [(hook, 1)], workers=3, timeout_s=60)])


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_exception_in_any_hook_of_rank_0_ends_all(hook: str, name: str) -> None:
    kind, options = STRATEGIES[name]
    check(hook, 0, [ends[0] for ends in launch(_fit, kind, options, [(hook, 0)], workers=3, timeout_s=60)])


class BrokenSetup(Callback):
    """While the others go on to the checkpoint's folder, which rank 0 tells them."""

    def setup(self, trainer: Any, model: Any, stage: str) -> None:
        if trainer.global_rank == 1:
            raise ArithmeticError("broken in setup")


def _fails_in_setup_and_saves(kind: Any, options: dict[str, Any], folder: str) -> tuple[str, float, list[str]]:
    callbacks = [BrokenSetup(), ModelCheckpoint(folder), OnExceptionCheckpoint(folder, "stopped")]
    t = trainer(strategy=kind(**options), callbacks=callbacks)
    began_s = time.monotonic()
    try:
        t.fit(Net(), loader(160, 8))
        said = "trained"
    except (ArithmeticError, PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began_s, _left()


@pytest.mark.parametrize("name", ["adpsgd, raising", pytest.param("adpsgd", marks=pytest.mark.slow)])
def test_a_callback_that_saves_when_setup_has_failed_waits_for_nobody(name: str, tmp_path: Path) -> None:
    kind, options = STRATEGIES[name]
    check("setup", 1, launch(_fails_in_setup_and_saves, kind, options, str(tmp_path), workers=2, timeout_s=60))


@pytest.mark.parametrize("name", ["adpsgd", pytest.param("adpsgd, raising", marks=pytest.mark.slow)])
def test_an_exception_in_a_loader_process_ends_all(name: str) -> None:
    kind, options = STRATEGIES[name]
    results = [ends[0] for ends in launch(_fit, kind, options, [("loader", 0)], workers=2, timeout_s=60)]
    assert any("broken in a loader process" in said for said, _, _ in results)
    assert all(seconds < LONGEST_S and left == [] for _, seconds, left in results), results
    assert all(said.startswith(("ArithmeticError", PeerError.__name__)) for said, _, _ in results)


def _gossip_fails() -> tuple[str, float, list[str]]:
    def broken(self: Gossip, *_: Any) -> None:
        raise ZeroDivisionError("broken in the gossip thread")

    t = trainer(strategy=ADPSGDStrategy(topology="complete"), max_epochs=50)
    if t.strategy.cluster_environment.global_rank() == 1:
        Gossip._average = broken  # type: ignore[method-assign]
    began_s = time.monotonic()
    with pytest.raises((ZeroDivisionError, PeerError)) as caught:
        t.fit(Net(), loader(640, 8))
    return repr(caught.value), time.monotonic() - began_s, _left()


def test_a_failure_in_the_gossip_thread_ends_all() -> None:
    results = launch(_gossip_fails, workers=3, timeout_s=60)
    assert results[1][0] == "ZeroDivisionError('broken in the gossip thread')"
    assert all(said.startswith("PeerError") for said, _, _ in (results[0], results[2]))
    assert all(seconds < LONGEST_S and left == [] for _, seconds, left in results)


class Interrupted(Callback):
    """Ctrl-C reaches rank 1 only."""

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.cluster_environment.global_rank() == 1 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGINT)


def _interrupted(options: dict[str, Any]) -> tuple[str, float, list[str]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
    t = trainer(strategy=ADPSGDStrategy(**options), max_epochs=20, callbacks=[Interrupted()])
    began_s = time.monotonic()
    try:
        t.fit(Net(), loader(480, 8))
        said = "trained"
    except (SystemExit, PeerError) as error:
        said = repr(error)
    return said, time.monotonic() - began_s, _left()


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"on_peer_failure": "raise"}, marks=pytest.mark.slow)], ids=["continue", "raise"]
)
def test_an_interrupt_of_one_rank_ends_all_with_a_status_that_is_not_0(options: dict[str, Any]) -> None:
    with job(_interrupted, options, workers=3) as started:
        started.start_all()
        ends = dict(started.outcomes())
    assert ends[1][0] == "SystemExit(1)"
    assert all(ends[rank][0].startswith("PeerError") for rank in (0, 2)), ends
    assert all(seconds < LONGEST_S and left == [] for _, seconds, left in ends.values()), ends
