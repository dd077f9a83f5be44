"""Under what conditions the contenders run. A new scenario is one row of SCENARIOS."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
    rate_mbit: float = 0.0
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


@dataclass(frozen=True)
class Scenario:
    """A table of its own.

    Args:
        question: above it.
        disturbance: what happens beside an undisturbed run, at each rate; None for undisturbed runs alone.
        rates: if the command line says none.
    """

    question: str
    disturbance: Condition | None = None
    rates: Sequence[float] = (1_000,)

    def conditions(self, rates: Sequence[float]) -> list[Condition]:
        """Of its runs."""
        if self.disturbance is None:
            return [Condition(rate_label(rate), rate) for rate in rates]
        both = Condition(UNDISTURBED, cap_s=self.disturbance.cap_s), self.disturbance
        return [
            replace(each, rate_mbit=rate, label=each.label if len(rates) == 1 else f"{rate_label(rate)}, {each.label}")
            for rate in rates
            for each in both
        ]


_SLOW_LINK = f"one link {rate_label(SLOW_LINK_MBIT)}"

SCENARIOS = {
    "rates": Scenario("How long do contenders take on links of different rates?", rates=RATES_MBIT),
    "random": Scenario(
        f"… with links that have a tenth of their rate {SLOW_SHARE:.0%} of the time, at random?",
        Condition("links slow at random", slow_share=SLOW_SHARE),
    ),
    "slow_link": Scenario(
        f"… with one host's link at {SLOW_LINK_MBIT:g} Mb/s?",
        Condition(_SLOW_LINK, slow_link_mbit=SLOW_LINK_MBIT, cap_s=SHORT_CAP_S),
    ),
    "slow_worker": Scenario(
        f"… with one worker {SLOW_WORKER:g} times slower?", Condition("one worker slow", slow_worker=SLOW_WORKER)
    ),
    "cross_traffic": Scenario(
        f"… with {FLOWS} other connections each way through one host's link?", Condition("cross traffic", flows=FLOWS)
    ),
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
    with ExitStack() as stack:
        for host, arguments, said in ((worker, (), "listening"), (other, (worker.address,), "flowing")):
            log, options = folder / f"traffic-{host.number}.log", (str(PORT), str(flows), *arguments)
            process = Process(host, "benchmarks.network.traffic", options, environment={}, log=log)
            stack.callback(process.close)
            process.start()
            process.await_line(said, 30.0)
        yield
