"""How many exchanges a step can be had where the network is slow? The pace asks for one; random pairs do not always find time.

A worker is in one exchange at a time, and a caller waits for whom it drew. So where an exchange takes as long as a step, ports
stand idle while others queue. And where the request itself takes long, both ends of a pair may be calling: with symmetric roles
a worker that is calling refuses, and the caller draws again after a wait of at most 0.05 s, however long a step is.
"""

from __future__ import annotations

from typing import Any

from benchmarks.reproduction.report import Report
from benchmarks.reproduction.shared_network import COMPUTE_S, GBIT, MODEL_BYTES, WORKERS, epoch, links
from lightning_gossip.algorithm.adpsgd.partner_sampler import Roles
from lightning_gossip.simulation import ADPSGD, Cluster, Links, Steps, Uniform, simulate

TOPOLOGIES = ("ring", "exponential", "bipartite_complete")
ROLES: tuple[Roles, ...] = ("bipartite", "symmetric")
ROUND_TRIPS = (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)  # of a request and its answer, over a step
STEPS = 60


def where_an_exchange_takes_a_step(topology: str) -> float:
    """Exchanges a step on even links of just that bandwidth."""
    net = links("uniform", MODEL_BYTES / COMPUTE_S / GBIT)
    return epoch(ADPSGD(topology=topology), net, batches=STEPS * WORKERS).exchanges


def where_a_request_takes(share: float, roles: Roles, *, workers: int = WORKERS, step_s: float = COMPUTE_S) -> float:
    """Exchanges a step where the round trip of a request is a share of a step, and what is sent takes no time besides."""
    strategy, net = ADPSGD(topology="exponential", roles=roles), Links(latency_s=share * step_s / 2)
    result = simulate(strategy, Cluster(workers, Uniform(step_s, 0.1)), work=Steps(number=STEPS), links=net)
    assert result.exchanges_per_step is not None
    return result.exchanges_per_step


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    report.table(
        f"Exchanges a step where an exchange takes as long as a step; {WORKERS} workers",
        ("graph", "exchanges a step"),
        [[topology, f"{where_an_exchange_takes_a_step(topology):.2f}"] for topology in TOPOLOGIES],
    )
    report.table(
        "Exchanges a step against the round trip of a request, over a step; exponential graph",
        ("roles", "step, s", *(f"{share:g}" for share in ROUND_TRIPS)),
        [
            [roles, f"{step_s:g}", *(f"{where_a_request_takes(share, roles, step_s=step_s):.2f}" for share in ROUND_TRIPS)]
            for roles in ROLES
            for step_s in (COMPUTE_S, 1.0)
        ],
        caption="What is sent takes no time besides.",
    )
    return {"workers": WORKERS, "compute_s": COMPUTE_S, "steps": STEPS}
