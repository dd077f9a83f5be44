"""Under what conditions the contenders run. A new scenario is one function and one row of SCENARIOS."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Host, Network, Process

RATES_MBIT = (10_000, 1_000, 200)
UNDISTURBED = "undisturbed"

SLOW_LINK_MBIT = 20.0
SLOW_WORKER = 4.0
SLOW_SHARE, SLOW_FACTOR = 0.01, 10.0
SLOT_S = 0.5
"""A link is slow or not for as long as this, independently of the slot before."""
FLOWS = 2
PORT = 5201

CAP_S = 240.0
SHORT_CAP_S = 40.0  # where some contenders take ten seconds a step, and the question is how fast the others are


@dataclass(frozen=True)
class Condition:
    """The network and the workers of a run. All links have the rate; what else there is happens to the last host.

    Args:
        label: in tables and figures.
        rate_mbit: of the links.
        slow_link_mbit: of the last host's link.
        slow_share: of the time, in which a link has a tenth of its rate, each link by itself.
        slow_worker: how many times longer the last worker computes.
        flows: TCP connections of other machines through the last host's link, in each direction.
        cap_s: the run is stopped after this time of training.
    """

    label: str
    rate_mbit: float
    slow_link_mbit: float | None = None
    slow_share: float = 0.0
    slow_worker: float = 1.0
    flows: int = 0
    cap_s: float = CAP_S

    @property
    def other_hosts(self) -> int:
        """Machines beside the workers'."""
        return 1 if self.flows else 0


def rate_label(rate_mbit: float) -> str:
    return f"{rate_mbit / 1000:g} Gb/s" if rate_mbit >= 1000 else f"{rate_mbit:g} Mb/s"


def _rates(rates: Sequence[float]) -> list[Condition]:
    return [Condition(rate_label(rate), rate) for rate in rates]


def _random(rates: Sequence[float]) -> list[Condition]:
    return _beside_undisturbed(rates, lambda rate: Condition("links slow at random", rate, slow_share=SLOW_SHARE))


def _slow_link(rates: Sequence[float]) -> list[Condition]:
    label = f"one link {rate_label(SLOW_LINK_MBIT)}"
    return _beside_undisturbed(
        rates, lambda rate: Condition(label, rate, slow_link_mbit=SLOW_LINK_MBIT, cap_s=SHORT_CAP_S), cap_s=SHORT_CAP_S
    )


def _slow_worker(rates: Sequence[float]) -> list[Condition]:
    return _beside_undisturbed(rates, lambda rate: Condition("one worker slow", rate, slow_worker=SLOW_WORKER))


def _cross_traffic(rates: Sequence[float]) -> list[Condition]:
    return _beside_undisturbed(rates, lambda rate: Condition("cross traffic", rate, flows=FLOWS))


def _beside_undisturbed(
    rates: Sequence[float], disturbed: Callable[[float], Condition], *, cap_s: float = CAP_S
) -> list[Condition]:
    conditions = []
    for rate in rates:
        pair = [Condition(UNDISTURBED, rate, cap_s=cap_s), disturbed(rate)]
        conditions += pair if len(rates) == 1 else [_at_rate(condition) for condition in pair]
    return conditions


def _at_rate(condition: Condition) -> Condition:
    return Condition(**{**condition.__dict__, "label": f"{rate_label(condition.rate_mbit)}, {condition.label}"})


@dataclass(frozen=True)
class Scenario:
    """A table of its own."""

    question: str
    conditions: Callable[[Sequence[float]], list[Condition]]
    rates: Sequence[float] = (1_000,)


SCENARIOS = {
    "rates": Scenario("How long do contenders take on links of different rates?", _rates, RATES_MBIT),
    "random": Scenario(f"… with links that have a tenth of their rate {SLOW_SHARE:.0%} of the time, at random?", _random),
    "slow_link": Scenario(f"… with one host's link at {SLOW_LINK_MBIT:g} Mb/s?", _slow_link),
    "slow_worker": Scenario(f"… with one worker {SLOW_WORKER:g} times slower?", _slow_worker),
    "cross_traffic": Scenario(f"… with {FLOWS} other connections each way through one host's link?", _cross_traffic),
}


@contextmanager
def disturbed(net: Network, condition: Condition, scale: float, seed: int, folder: Path) -> Iterator[None]:
    """Let happen what the condition says, until the end of the block.

    Args:
        net: whose last hosts are those of other machines, if the condition has any.
        condition: which.
        scale: of all rates.
        seed: of what is random; the contenders of a table have the same.
        folder: for logs.
    """
    workers = net.hosts[: len(net.hosts) - condition.other_hosts]
    with ExitStack() as stack:
        if condition.slow_link_mbit is not None:
            net.set_rate(workers[-1], condition.slow_link_mbit * scale)
        if condition.slow_share:
            stack.enter_context(_slow_at_random(net, workers, condition, scale, seed))
        if condition.flows:
            stack.enter_context(_cross_traffic_through(workers[-1], net.hosts[-1], condition.flows, folder))
        yield


@contextmanager
def _slow_at_random(net: Network, hosts: Sequence[Host], condition: Condition, scale: float, seed: int) -> Iterator[None]:
    done = threading.Event()

    def change() -> None:
        draws = random.Random(seed)
        began_s = time.monotonic()
        slow: set[Host] = set()
        slot = 0
        while not done.wait(max(0.0, began_s + slot * SLOT_S - time.monotonic())):
            now = {host for host in hosts if draws.random() < condition.slow_share}
            for host in now ^ slow:
                net.set_rate(host, condition.rate_mbit * scale / (SLOW_FACTOR if host in now else 1.0))
            slow, slot = now, slot + 1

    thread = threading.Thread(target=change, name="benchmark-links")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _cross_traffic_through(worker: Host, other: Host, flows: int, folder: Path) -> Iterator[None]:
    processes = []
    try:
        for host, arguments in ((worker, ()), (other, (worker.address,))):
            process = Process(
                host,
                "benchmarks.network.traffic",
                (str(PORT), str(flows), *arguments),
                environment={},
                log=folder / f"traffic-{host.number}.log",
            )
            processes.append(process)
            process.start()
            if not arguments:
                process.await_line("listening", 30.0)
        processes[-1].await_line("flowing", 30.0)
        yield
    finally:
        for process in processes:
            process.close()
