"""A-PSGD in training: staleness by its identity, the bounds, and a slow worker."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_gossip import APSGDStrategy
from lightning_gossip.algorithm.apsgd.server import ParameterServer
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes

N = 4
Event = tuple[str, int, int]  # "pull" or "push", rank, the server's version then (before a push is applied)


class Computes(Callback):
    """Batches last a time of their rank's own."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        time.sleep(self.seconds[trainer.global_rank])  # stands for computing


def _run(options: dict[str, Any], seconds: list[float], samples: int) -> Any:
    """One epoch; on the server's rank also every pull and push, in order, and the most workers in flight."""
    events: list[Event] = []
    most = [0]
    pull, push = ParameterServer.pull, ParameterServer.push

    def observed_pull(self: ParameterServer, rank: int) -> int:
        version = pull(self, rank)
        events.append(("pull", rank, version))
        most[0] = max(most[0], len(self.in_flight))
        return version

    def observed_push(self: ParameterServer, rank: int, update: Any, **kwargs: Any) -> int | None:
        before = self.version
        staleness = push(self, rank, update, **kwargs)
        events.append(("push" if staleness is not None else "drop", rank, before))
        return staleness

    ParameterServer.pull, ParameterServer.push = observed_pull, observed_push  # type: ignore[method-assign]
    t = trainer(strategy=APSGDStrategy(**options), max_epochs=1, callbacks=[Computes(seconds)])
    began_s = time.monotonic()
    t.fit(Net(), loader(samples, 4))
    return [w.as_dict() for w in t.strategy.report.workers], events, most[0], time.monotonic() - began_s


VARIED = [0.004, 0.007, 0.010, 0.016]
CASES: dict[str, dict[str, Any]] = {
    "all active": {},
    "two active": {"active_workers": 2},
    "bounded by waiting": {"max_staleness": 4, "on_stale": "wait"},
    "bounded by dropping": {"max_staleness": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_staleness_is_what_the_identity_says_and_the_bounds_hold(case: str) -> None:
    options = CASES[case]
    workers, events, most, _ = launch(_run, options, VARIED, 4 * 30 * N, workers=N)[0]
    pushes = [(rank, version) for kind, rank, version in events if kind == "push"]
    total = sum(w["staleness_mean"] * (w["exchanges"] - w["dropped"]) for w in workers)
    if not any(w["dropped"] for w in workers):
        # others' updates between a worker's first pull and its last push; those while it queued for a pull count for nobody
        identity = queued = 0
        for rank in range(N):
            own = [version for pusher, version in pushes if pusher == rank]
            first = next(version for kind, puller, version in events if (kind, puller) == ("pull", rank))
            identity += own[-1] - first - (len(own) - 1)
            pulls = [version for kind, puller, version in events if (kind, puller) == ("pull", rank)]
            queued += sum(pulled - (pushed + 1) for pushed, pulled in zip(own[:-1], pulls[1:], strict=False))
        assert total == pytest.approx(identity - queued)
        assert queued == 0 or "active_workers" in options
    assert most <= options.get("active_workers", N)
    assert max(w["staleness_max"] for w in workers) <= options.get("max_staleness", 10**9)
    if options.get("on_stale") == "wait":
        assert all(w["dropped"] == 0 for w in workers)
    count = sum(w["exchanges"] - w["dropped"] for w in workers)
    assert count == len(pushes)
    assert count >= 20 * N or any(w["dropped"] for w in workers)
    if (
        case == "all active"
    ):  # less where a worker begins late; tests/runtime/apsgd/test_server_staleness.py has the mean itself
        assert total / count <= (N - 1) * 1.05


@pytest.mark.slow  # tests/runtime/apsgd/test_server_staleness.py shows the same of the server
@pytest.mark.alone
def test_one_worker_slowed_tenfold_does_not_slow_the_others() -> None:
    results = {slow: launch(_run, {}, [0.02, 0.02, 0.02, slow], 4 * 160, workers=N) for slow in (0.02, 0.2)}
    rates = {}
    for slow, result in results.items():
        workers = result[0][0]
        rates[slow] = sum(w["steps"] / (w["busy_s"] + w["wait_s"] - w["last_wait_s"]) for w in workers[:3])
        if slow == 0.2:
            assert workers[3]["steps"] < 0.3 * workers[0]["steps"]
    assert rates[0.2] > 0.9 * rates[0.02]


def _held_back(relative: bool) -> Any:
    trigger = {"threshold": 1e9, "relative": relative}
    t = trainer(strategy=APSGDStrategy(event_trigger=trigger), max_epochs=2)
    model = Net()
    t.fit(model, loader(128, 4), loader(64, 8, shuffle=False))
    return t.strategy.report.workers[t.global_rank].exchanges, float(t.callback_metrics["val_acc"])


@pytest.mark.parametrize("relative", [pytest.param(False, marks=pytest.mark.slow), True])
def test_updates_too_small_to_send_arrive_at_the_rendezvous(relative: bool) -> None:
    for pushes, accuracy in launch(_held_back, relative, workers=2):
        assert pushes == 2  # one an epoch
        assert accuracy > 0.6


def _evaluated(at_rendezvous: str) -> Any:
    pulled: list[float] = []

    class First(Callback):
        """What the first pull of an epoch brings, beside what was validated."""

        def on_before_zero_grad(self, trainer: Any, model: Any, optimizer: Any) -> None:
            if len(pulled) < trainer.current_epoch:
                pulled.append(float((flat(model) - self.validated).norm()))
                dist.barrier()  # else one may have ended the epoch, and sent its updates, before the other's first pull

        def on_validation_end(self, trainer: Any, model: Any) -> None:
            self.validated = flat(model).clone()

    # held back until the rendezvous, so that no update of another comes before the first pull
    strategy = APSGDStrategy(at_rendezvous=at_rendezvous, event_trigger=1e9)
    t = trainer(strategy=strategy, max_epochs=3, callbacks=[First()])
    # without running statistics, which the forward pass before has moved
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    t.fit(Net(network=network), loader(64, 4), loader(64, 8, shuffle=False))
    return pulled


@pytest.mark.parametrize("at_rendezvous", ["adopt", "evaluate"])
def test_an_epoch_begins_with_the_model_that_was_validated(at_rendezvous: str) -> None:
    for distances in launch(_evaluated, at_rendezvous, workers=2):
        assert len(distances) == 2
        assert max(distances) < 1e-6


def _written(folder: str, strategy: Any, resumed: Any) -> Any:
    keep = ModelCheckpoint(folder, "last", enable_version_counter=False)
    trainer(strategy=strategy, max_epochs=1, callbacks=[keep]).fit(Net(), loader(64, 4))
    t, model = trainer(strategy=resumed, max_epochs=2), Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(model, loader(64, 4), ckpt_path=f"{folder}/last.ckpt")
    said = [str(warning.message) for warning in caught if "whose own state" in str(warning.message)]
    return t.current_epoch, t.global_rank, said, flat(model).tolist()


@pytest.mark.parametrize(
    ("strategy", "resumed"),
    [("adpsgd", "apsgd"), ("periodic_averaging", "adpsgd"), pytest.param("adpsgd", "qsgd", marks=pytest.mark.slow)],
)
def test_a_fit_goes_on_from_the_checkpoint_of_another_strategy(strategy: str, resumed: str, tmp_path: Path) -> None:
    a, b = launch(_written, str(tmp_path), strategy, resumed)
    assert a[0] == b[0] == 2
    assert a[3] == b[3]
    assert any(strategy in text and resumed in text for text in a[2])
