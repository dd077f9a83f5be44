"""What is measured: each function is one phase, which all processes that have workers are in at the same time."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable, Generator
from typing import Any

import torch.distributed as dist

from benchmarks.control_plane.clients import PREFIX, Loop, Traffic, Worker, cpu_s
from benchmarks.harness import process_group
from lightning_gossip.algorithm.membership.membership import Membership
from lightning_gossip.algorithm.membership.store import Count, Pause
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership.monitor import HEARTBEAT_S
from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue
from lightning_gossip.runtime.work_sharing.completion_log import CompletionLog
from lightning_gossip.transport.endpoint import Endpoint

STEP_S = 0.25
_WARM_S = 2.0  # the first heartbeats and claims ask for more
_ABOUT = "model 0123456789abcdef, data 50000 samples in batches of 128"
_SNAPSHOT = bytes(1024)  # what joiners get beside the model


class Part:
    """The workers of this process: every so many-th of all, so that neighbours on the ring are in different processes.

    Args:
        port: of the store.
        store_pid: the process of the store.
        workers: of the job.
    """

    def __init__(self, port: int, store_pid: int, workers: int) -> None:
        self.port = port
        self.store_pid = store_pid
        self.all = [WorkerId(rank, 1) for rank in range(workers)]
        self.loop = Loop()
        self.here = [Worker(port, worker, self.all) for worker in self.all[dist.get_rank() :: dist.get_world_size()]]

    def meet(self) -> None:
        """Wait until all processes are here; the scripts go on meanwhile."""
        work = dist.barrier(async_op=True)
        assert work is not None
        self.loop.run(work.is_completed)

    def of(self, rank: int) -> Worker | None:
        """The worker with an initial rank, if it is in this process."""
        return next((worker for worker in self.here if worker.me.initial_rank == rank), None)

    def together(self, script: Callable[[Worker], Any]) -> dict[str, Any]:
        """All workers do something at once, on their training threads: when they began and ended, and what it cost."""
        self.meet()
        began_s, before = now_s(), self.spent()
        scripts = [self.loop.start(script(worker), worker.training) for worker in self.here]
        self.loop.run(lambda: all(script.ended for script in scripts))
        ended_s, clients_s = now_s(), time.process_time() - before["clients_s"]
        self.meet()
        after = self.spent()
        return {
            "began_s": began_s,
            "ended_s": ended_s,
            "store_s": after["store_s"] - before["store_s"],
            "clients_s": clients_s,
            "traffic": after["training"] - before["training"],
        }

    def spent(self) -> dict[str, Any]:
        """So far: CPU time of the store and of this process, calls and bytes of the workers' two connections."""
        return {
            "at_s": now_s(),
            "store_s": cpu_s(self.store_pid),
            "clients_s": time.process_time(),
            "training": sum((worker.training.traffic for worker in self.here), Traffic()),
            "monitoring": sum((worker.monitoring.traffic for worker in self.here), Traffic()),
            "ticks": sum(worker.ticks for worker in self.here),
        }


@process_group()
def measure(port: int, store_pid: int, workers: int, rounds: int, epoch_s: float, deaths: int) -> dict[str, Any]:
    """All phases, one after the other.

    Args:
        port, store_pid: of the store.
        workers: of the job.
        rounds: how many are timed.
        epoch_s: how long heartbeats and claims are counted, in seconds.
        deaths: how many workers die and come back.
    """
    gc.disable()  # the heap of hundreds of workers takes long to search, that of one does not
    logging.getLogger("lightning_gossip").setLevel(logging.ERROR)
    part = Part(port, store_pid, workers)
    found: dict[str, Any] = {"start": hello(part)}
    found["rounds"] = [part.together(_gather) for _ in range(rounds + 1)][1:]
    for worker in part.here:
        worker.scripts.append(part.loop.start(worker.heartbeats(), worker.monitoring, after_s=random.uniform(0.0, HEARTBEAT_S)))
    found["epoch"] = epoch(part, epoch_s)
    victims = random.Random(workers).sample(range(1, workers), deaths)  # rank 0 leads
    found["deaths"] = [death(part, victim) for victim in victims]
    part.meet()
    for worker in part.here:
        worker.close()
    return found


def _gather(worker: Worker) -> Generator[Any, Any, Any]:
    """One round, in which all say something different."""
    values = yield from worker.membership.gather({"rank": worker.me.initial_rank, "seconds": 0.25}, "values")
    assert len(values) == len(worker.membership.members)


def hello(part: Part) -> dict[str, Any]:
    """The beginning of a Trainer's work, without the making of groups."""

    def script(worker: Worker) -> Generator[Any, Any, Any]:
        yield Count(f"{PREFIX}/incarnation/{worker.me.initial_rank}")
        worker.monitor.begin_use(1)
        yield from worker.monitor.send()
        yield from worker.membership.hello(1, intact=False, about=_endpoint(worker))

    return part.together(script)


def _endpoint(worker: Worker) -> Endpoint:
    number = worker.me.initial_rank
    address = f"10.0.{number // 250}.{number % 250}"
    return Endpoint("4026531840", f"node-{number}", address, "GLOO_SOCKET_IFNAME=eth0", (f"eth0 {address}",))


def epoch(part: Part, seconds: float) -> dict[str, Any]:
    """The middle of an epoch: heartbeats, a claim a step, and a word about each batch that is done."""
    steps = dict.fromkeys(part.here, 0)

    def script(worker: Worker) -> Generator[Any, Any, Any]:
        queue = EpochQueue(
            worker.training,
            f"{PREFIX}/epoch/0",
            rank=worker.membership.rank,
            workers=len(part.all),
            batches=len(part.all) * 10_000,
            lookahead=2,
        )
        log = CompletionLog(worker.training, f"{PREFIX}/data", worker)
        log.begin("0")
        jitter = random.Random(worker.me.initial_rank)
        due_s = now_s() + jitter.uniform(0.0, STEP_S)
        while True:
            yield Pause(max(0.0, due_s - now_s()))
            due_s += jitter.uniform(0.95, 1.05) * STEP_S
            position = queue.claim(STEP_S)
            assert position is not None
            queue.ledger.step()
            log.finished(position)
            steps[worker] += 1

    part.meet()
    scripts = [part.loop.start(script(worker), worker.training) for worker in part.here]
    _run_for(part, _WARM_S)
    part.meet()
    before, counted = part.spent(), sum(steps.values())
    _run_for(part, seconds)
    after, counted = part.spent(), sum(steps.values()) - counted
    for claiming in scripts:
        part.loop.stop(claiming)
    return {name: after[name] - before[name] for name in after} | {"steps": counted}


def death(part: Part, rank: int) -> dict[str, Any]:
    """A worker ends without a word, and one neighbour loses its connection; then it comes back."""
    victim, neighbour = part.of(rank), part.of((rank + 1) % len(part.all))
    part.meet()
    began_s = now_s()
    dead = next(worker for worker in part.here[0].membership.members if worker.initial_rank == rank)
    if victim is not None:
        for script in victim.scripts:
            part.loop.stop(script)
        part.here.remove(victim)
        victim.close()
    if neighbour is not None:
        neighbour.monitor.connection_lost(dead)
        for script in neighbour.scripts:
            part.loop.wake(script)
    known_s: dict[Worker, float] = {}

    def all_know() -> bool:
        for worker in part.here:
            if worker not in known_s and worker.monitor.has_failed(dead):
                known_s[worker] = now_s()
        return len(known_s) == len(part.here)

    part.loop.run(all_know)
    found: dict[str, Any] = {"began_s": began_s, "first_s": min(known_s.values()), "known_s": max(known_s.values())}
    found["excluding"] = part.together(_gather_of_those_left)
    return found | {"join": join(part, dead, is_here=victim is not None)}


def _gather_of_those_left(worker: Worker) -> Generator[Any, Any, Any]:
    yield from worker.membership.gather(None, "values")


def join(part: Part, dead: WorkerId, *, is_here: bool) -> dict[str, Any]:
    """It is started again, asks, and is admitted by all, as at the beginning of an epoch."""
    part.meet()
    began_s = now_s()
    back: list[Worker] = []
    snapshots: list[Any] = []
    if is_here:
        me = WorkerId(dead.initial_rank, dead.incarnation + 1)
        worker = Worker(part.port, me, part.all, late=True)
        back.append(worker)

        def joiner() -> Generator[Any, Any, Any]:
            yield Count(f"{PREFIX}/incarnation/{me.initial_rank}")
            worker.monitor.begin_use(1)
            yield from worker.monitor.send()
            yield from worker.membership.hello(1, intact=False)
            snapshots.append((yield from worker.membership.join(60.0, _ABOUT)))

        joining = part.loop.start(joiner(), worker.training)
        worker.scripts.append(part.loop.start(worker.heartbeats(), worker.monitoring))
    leader = part.of(0)
    if leader is not None:
        part.loop.run(lambda: bool(leader.monitor.join_requests()))

    def admit(worker: Worker) -> Generator[Any, Any, Any]:
        membership: Membership = worker.membership
        joiners = (yield from membership.gather(list(worker.monitor.join_requests()), "the workers that fit"))[0]
        snapshot = yield from membership.broadcast(_SNAPSHOT, 0)
        yield from membership.admit(joiners, snapshot)

    members = part.together(admit)
    if is_here:
        part.loop.run(lambda: joining.ended)
        assert snapshots
    ended_s = now_s()
    part.here += back
    part.meet()
    for worker in part.here:
        assert len(worker.membership.members) == len(part.all)
    return {"began_s": began_s, "ended_s": ended_s, "members": members}


def _run_for(part: Part, seconds: float) -> None:
    until_s = now_s() + seconds
    part.loop.run(lambda: now_s() >= until_s)
