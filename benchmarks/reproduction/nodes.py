"""16 nodes of 8 GPUs: what an all-reduce, gossip between all ranks and gossip between islands come to behind shared cards.

Elsewhere in these headlines each worker has a port of its own, as on nodes of one GPU. Here 8 ranks share a node's card, and
reach each other over links of 200 GB/s. Calibration as for the shared networks: ResNet-50's 25.6 million float32 parameters,
steps of 0.15 s ± 10 %, 50 µs between nodes. 40 steps of each worker on the exponential graph; the average of all models at the
end is not in the times.

An all-reduce crosses each card once, so it sends 2 (n − 1)/n models through it in a step, whatever there is behind the card.
Gossip of all ranks sends up to 8 models each way for one exchange of each. Islands train together inside a node, and each rank
gossips an eighth of the model: one model each way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.reproduction.report import Report, progress
from benchmarks.reproduction.shared_network import COMPUTE_S, GBIT, LATENCY_S, MODEL_BYTES
from lightning_gossip.simulation import (
    ADPSGD,
    AllReduce,
    Cluster,
    Links,
    Nodes,
    Recording,
    Steps,
    Strategy,
    Uniform,
    simulate,
)

NODES, RANKS = 16, 8
STEPS = 40
CARDS = (100.0, 25.0, 10.0, 5.0)  # Gb/s
INSIDE_S, INSIDE = 5e-6, 200e9  # of a message, and bytes a second
STRATEGIES: dict[str, Strategy] = {
    "DDP": AllReduce(),
    "AD-PSGD, all ranks": ADPSGD(topology="exponential"),
    "AD-PSGD, islands": ADPSGD(topology="exponential", island="node"),
    "islands, 4 exchanges a step asked for": ADPSGD(topology="exponential", island="node", exchanges_per_step=4.0),
}


class Outcome(NamedTuple):
    """One run: seconds until the last step has ended, and exchanges a step."""

    seconds: float
    exchanges: float


def links(gbits: float, *, nodes: int = NODES) -> Links:
    """Nodes behind cards of so many Gb/s."""
    return Links(
        latency_s=LATENCY_S,
        bandwidth=gbits * GBIT,
        nodes=Nodes.equal(nodes, RANKS, latency_s=INSIDE_S, bandwidth=INSIDE),
    )


def trained(strategy: Strategy, gbits: float, *, nodes: int = NODES, steps: int = STEPS) -> Outcome:
    """Some steps of each rank."""
    result = simulate(
        strategy,
        Cluster(nodes * RANKS, Uniform(COMPUTE_S, 0.1)),
        work=Steps(number=steps),
        links=links(gbits, nodes=nodes),
        model_bytes=MODEL_BYTES,
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    last_s = max(event.time_s for event in result.trace if event.kind == "step")
    merged = sum(event.kind == "merge" and event.time_s <= last_s for event in result.trace)
    return Outcome(last_s, merged / result.steps)


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    rows = []
    for gbits in CARDS:
        with progress(f"cards of {gbits:g} Gb/s"):
            of = {name: trained(strategy, gbits) for name, strategy in STRATEGIES.items()}
        ddp = of["DDP"].seconds
        rows.append(
            [
                f"{gbits:g}",
                f"{ddp:.2f}",
                *(
                    f"{one.seconds:.2f} ({ddp / one.seconds:.2f}×), {one.exchanges:.2f}"
                    for name, one in of.items()
                    if name != "DDP"
                ),
            ]
        )
    report.table(
        f"{STEPS} steps: seconds (DDP's over it), and exchanges of an element per step",
        ("card, Gb/s", *STRATEGIES),
        rows,
        caption=f"{NODES} nodes of {RANKS} GPUs, a card for each node.",
    )
    return {
        "nodes": NODES,
        "ranks": RANKS,
        "steps": STEPS,
        "compute_s": COMPUTE_S,
        "latency_s": LATENCY_S,
        "inside": [INSIDE_S, INSIDE],
    }
