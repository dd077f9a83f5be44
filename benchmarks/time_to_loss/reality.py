"""How far is virtual time from real time? One row of the table by real processes on limited links, and the same simulated.

    python -m benchmarks.network --scenario slow_worker --rates 200 --contenders ddp adpsgd --seeds 1 --work char_gpt \\
        --compute 0.3 --steps 16 --output benchmarks/results/network_char_gpt.json
    python -m benchmarks.time_to_loss.reality

and of two workers, which have a core each:

    python -m benchmarks.network --scenario rates --rates 200 --contenders ddp adpsgd --seeds 1 --work char_gpt --compute 0.3 \\
        --steps 16 --workers 2 --output benchmarks/results/network_char_gpt_2.json
    python -m benchmarks.time_to_loss.reality --runs benchmarks/results/network_char_gpt_2.json --output time_to_loss_reality_2

The real workers train the small model with an emulated step of ``--compute`` seconds; their links are scaled, so that the model
takes as many steps to send as the one that it stands for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, print_table, write_results
from benchmarks.network.workload import WORKS
from benchmarks.time_to_loss.task import SLOW_WORKER
from lightning_gossip.simulation import (
    ADPSGD,
    AllReduce,
    Cluster,
    Constant,
    Epochs,
    Links,
    Quadratic,
    Recording,
    Strategy,
    simulate,
)

_STRATEGIES: dict[str, Strategy] = {  # the emulated device computes before the backward pass, so that nothing overlaps
    "ddp": AllReduce(overlap=False),
    "adpsgd": ADPSGD(),
}


def virtual(run: dict[str, Any], workers: int, compute_s: float) -> tuple[float, float | None]:
    """Seconds until the last worker's last step, and exchanges of a worker a step, of a real run's like.

    Args:
        run: as ``benchmarks.network`` has written it.
        workers: how many.
        compute_s: of an emulated step.
    """
    work = WORKS[run["work"]]
    slow = {workers - 1: SLOW_WORKER} if "slow" in run["condition"] else {}
    bandwidth = run["rate_mbit"] * 1e6 / 8 * work.link_scale(compute_s)
    result = simulate(
        _STRATEGIES[run["contender"]],
        Cluster(workers, Constant(compute_s), slowdown=slow),
        work=Epochs(number=1, batches=workers * run["steps"], batch_size=work.batch_size),
        links=Links(bandwidth=bandwidth),
        objective=Quadratic([0.0]),
        model_bytes=work.nbytes,
        seed=run["seed"],
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    return max(event.time_s for event in result.trace if event.kind == "step"), result.exchanges_per_step


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_loss.reality", description="Virtual beside real time.")
    parser.add_argument(
        "--runs", type=Path, default=RESULTS / "network_char_gpt.json", help="what benchmarks.network has written"
    )
    parser.add_argument("--output", default="time_to_loss_reality", metavar="NAME", help="of the file in benchmarks/results")
    options = parser.parse_args()
    found = json.loads(options.runs.read_text())
    workers, compute_s = found["settings"]["workers"], found["settings"]["compute_s"]
    rows = []
    for run in found["runs"]:
        seconds, exchanges = virtual(run, workers, compute_s)
        rows.append(
            {
                "contender": run["contender"],
                "condition": run["condition"],
                "steps": run["steps"],
                "real_s": run["training_s"],
                "virtual_s": seconds,
                "virtual_over_real": seconds / run["training_s"],
                "real_exchanges_per_step": run["exchanges_per_step"],
                "virtual_exchanges_per_step": exchanges,
            }
        )
    columns = ["", "real, s", "virtual, s", "virtual ÷ real", "exchanges a step: real", "virtual"]
    cells = [
        (
            f"{row['contender']}, {row['condition']}",
            f"{row['real_s']:.1f}",
            f"{row['virtual_s']:.1f}",
            f"{row['virtual_over_real']:.2f}",
            "–" if row["real_exchanges_per_step"] is None else f"{row['real_exchanges_per_step']:.2f}",
            "–" if row["virtual_exchanges_per_step"] is None else f"{row['virtual_exchanges_per_step']:.2f}",
        )
        for row in rows
    ]
    print_table("Until the last worker's last step", columns, cells)
    print(write_results(options.output, {"compute_s": compute_s, "workers": workers, "rows": rows}))


if __name__ == "__main__":
    main()
