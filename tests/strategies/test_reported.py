"""What public trackers report and no other test of this package covers; tests/test_field_reports.py has the whole list."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_gossip import ADPSGDStrategy
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.topology.generators import ring
from tests.runtime.cluster import Cluster, training
from tests.strategies.jobs import job, survivors
from tests.strategies.launch import launch, outcomes
from tests.strategies.models import Net, loader, trainer
from tests.transport.faults import Fault


class Reducing(Callback):
    """All-reduces of the main thread on the default group while gossip goes on behind it: a step is as long as many of them."""

    def __init__(self, collectives: int) -> None:
        self.collectives = collectives

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        x = torch.ones(100)
        for _ in range(self.collectives // 10):
            dist.all_reduce(x)
            assert x[0] == trainer.world_size
            x.fill_(1.0)


def _reducing(collectives: int) -> Any:
    t = trainer(
        strategy=ADPSGDStrategy(work_sharing=False, exchanges_per_step=50), max_epochs=1, callbacks=[Reducing(collectives)]
    )
    t.fit(Net(), loader(160, 8))
    return t.global_step, [worker.exchanges for worker in t.strategy.report.workers]


@pytest.mark.processes
@pytest.mark.parametrize("collectives", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_gossip_beside_thousands_of_collectives_of_the_main_thread(collectives: int) -> None:
    for steps, exchanges in launch(_reducing, collectives, workers=2, timeout_s=90):
        assert steps == 10
        assert min(exchanges) > 10


_BYTES_ACKED = slice(120, 128)  # of Linux' struct tcp_info


def _acknowledged() -> Iterator[int]:
    """Bytes that each connection of this process has carried to its other end; from now on a few at a time."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, or no connection
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername():
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
                        yield int.from_bytes(
                            end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)[_BYTES_ACKED], sys.byteorder
                        )


def _killed_in_an_exchange(chunk: slice) -> None:
    carried = max(_acknowledged())
    if chunk.start > 0:  # the first chunk is on its way
        while max(_acknowledged()) < carried + (1 << 16):
            pass
        os.kill(os.getpid(), signal.SIGKILL)  # its peer has a part of it


def _one_is_killed() -> Any:
    model = Net(network=torch.nn.Sequential(torch.nn.Linear(8, 100_000), torch.nn.ReLU(), torch.nn.Linear(100_000, 2)))
    strategy = ADPSGDStrategy(topology=[(0, 1), (1, 2)], exchanges_per_step=20)  # so its first exchange is its peer's first
    t = trainer(strategy=strategy, max_epochs=2)
    if t.strategy.cluster_environment.global_rank() == 1:
        snapshot = Replica.snapshot

        def fatal(self: Replica, chunk: slice, out: torch.Tensor) -> None:
            _killed_in_an_exchange(chunk)
            snapshot(self, chunk, out)

        Replica.snapshot = fatal  # type: ignore[method-assign]
    t.fit(model, loader(240, 8))
    own = next(worker for worker in t.strategy.report.workers if worker.rank == t.strategy.cluster_environment.global_rank())
    return t.current_epoch, own.failed, t.strategy.report.lost


@pytest.mark.processes
def test_a_rank_that_ends_while_a_peer_sends_is_dropped_and_counted() -> None:
    with job(_one_is_killed, workers=3) as started:
        started.start_all()
        left = survivors(started.outcomes())
    assert [(epochs, lost) for epochs, _, lost in left] == [(2, [1]), (2, [1])]
    assert sum(failed for _, failed, _ in left) >= 1


class BreaksInTheSecondEpoch(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.cluster_environment.global_rank() == 1 and trainer.current_epoch == 1:
            raise ArithmeticError("broken in the second epoch")


def _logged(folder: str) -> None:
    logger = CSVLogger(folder, name="run", version=0, flush_logs_every_n_steps=10_000)
    trainer(strategy=ADPSGDStrategy(), max_epochs=3, logger=logger, callbacks=[BreaksInTheSecondEpoch()]).fit(
        Net(), loader(160, 8), loader(32, shuffle=False)
    )


@pytest.mark.processes
def test_on_a_failure_the_logger_has_written_and_the_traceback_is_out(tmp_path: Path) -> None:
    (_, zero), (_, one) = outcomes(_logged, str(tmp_path), workers=2)
    assert "ArithmeticError: broken in the second epoch" in one
    assert "PeerError" in zero
    rows = (tmp_path / "run" / "version_0" / "metrics.csv").read_text()
    assert "val_loss" in rows  # of the first epoch: rank 0 has finalized its logger before it ended


def test_with_30_percent_of_the_exchanges_lost_the_loss_still_falls_and_the_counters_match() -> None:
    chance = {rank: random.Random(rank) for rank in range(8)}
    faults = {rank: [Fault("drop", at=lambda _, rank=rank: chance[rank].random() < 0.3)] for rank in range(8)}
    cluster = Cluster(ring(8), faults=faults)
    targets = [torch.randn(40, dtype=torch.float64) for _ in range(8)]  # each worker has data of its own
    best = torch.stack(targets).mean(0)

    def loss() -> float:
        return float((cluster.models().mean(0) - best).square().sum())

    def step(rank: int, _: int) -> None:
        x = cluster.x[rank]
        for part, target in zip(x, targets[rank].split([13, 27]), strict=True):
            part.sub_(part - target, alpha=0.01)
        cluster.gossips[rank].step(x, step_s=1e-4)

    before = loss()
    with cluster.running():
        # callers come last and leave first: a request that finds a closed session would be refused by the peer
        callers_last = sorted(range(8), key=lambda rank: cluster.peers[rank].picker.initiates)
        for rank in callers_last:
            cluster.open(rank)
        with training(cluster, step):
            cluster.wait_for_exchanges(400)
        for rank in reversed(callers_last):
            cluster.gossips[rank].drain(cluster.x[rank])
    dropped = [transport.dropped for transport in cluster.transports]
    assert [gossip.counters.refused for gossip in cluster.gossips] == dropped  # in a bipartite graph nobody else refuses
    assert loss() < 0.1 * before
    callers = sum(gossip.counters.exchanges for gossip in cluster.gossips) / 2
    assert 0.2 < sum(dropped) / (sum(dropped) + callers) < 0.4
