"""What do few exchanges cost, and what do outer steps win back? The digits, in the simulator, three seeds.

Eight workers under virtual time whose links take none: exchanges are as frequent as asked. Every row is run with several inner
learning rates, and the one of the least mean test loss is shown, DDP's too. Bytes are those that one worker sends a step
and parameter. What has been measured is kept, so a run that is stopped goes on.

    python -m benchmarks.outer [--quick] [--table]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness import RESULTS, best_rate, console, print_table, spread, write_results
from lightning_gossip import Outer
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    AllReduce,
    Classes,
    Cluster,
    Objective,
    PeriodicAveraging,
    Recording,
    Steps,
    Strategy,
    Uniform,
    digits,
    mlp,
    simulate,
)

WORKERS, HIDDEN, LOCAL_STEPS = 8, 64, 50
LRS = (0.01, 0.03, 0.05, 0.1, 0.2)
SEEDS = (0, 1, 2)
SETTINGS = {  # samples of a worker's batch, steps
    "8 samples a worker, 1,000 steps": (8, 1000),
    "8 samples a worker, 4,000 steps": (8, 4000),
}


def gossip(**options: Any) -> ADPSGD:
    """On the complete graph, without a meeting."""
    return ADPSGD(topology="complete", work_sharing=False, at_rendezvous="evaluate", **options)


def few(**options: Any) -> ADPSGD:
    """With rounds of local steps, and without a dense start unless there is one."""
    return gossip(**{"local_steps": LOCAL_STEPS, "dense_share": 0.0, **options})


def exact(**options: Any) -> PeriodicAveraging:
    """The exact mean every so many steps."""
    return PeriodicAveraging(period=LOCAL_STEPS, at_rendezvous="evaluate", **options)


ROWS: dict[str, Strategy] = {
    "DDP": AllReduce(),
    "gossip, 1 a step": gossip(),
    "gossip, .06 a step": few(),
    "gossip, .02 a step": few(exchanges_per_step=0.02),
    "outer (1, .5 n), local, k = 3": few(outer=Outer()),
    "the same, int8": few(outer=Outer(), wire="int8"),
    "outer (1, .5 n), all, k = 3": few(outer=Outer(momentum_of="all")),
    "outer (.7, .9 n), local, k = 3": few(outer=Outer(0.7, 0.9)),
    "outer (1, .5 n), local, k = 1": few(outer=Outer(), exchanges_per_step=0.02),
    "dense start .05, gossip .06, int8": few(wire="int8", dense_share=0.05),
    "noloco: dense start .05, outer (1, .5 n), local, k = 3, int8": few(outer=Outer(), wire="int8", dense_share=0.05),
    "the same, H = 10": few(outer=Outer(), wire="int8", dense_share=0.05, local_steps=10),
    "exact mean": exact(),
    "exact mean, (1, .5 n)": exact(outer=Outer()),
    "exact mean, (.7, .9 n) = diloco": exact(outer=Outer(0.7, 0.9)),
    "exact mean, (1, .5 n), inner momentum averaged": exact(outer=Outer(), optimizer_state="average"),
    "exact mean, (.7, .5 h)": exact(outer=Outer(0.7, 0.5, nesterov=False)),
}


FIRST = next(iter(SETTINGS))
ELSEWHERE = (  # the rows of the other settings, and their learning rates
    "DDP",
    "exact mean",
    "exact mean, (1, .5 n)",
    "exact mean, (.7, .9 n) = diloco",
    "exact mean, (1, .5 n), inner momentum averaged",
    "dense start .05, gossip .06, int8",
    "noloco: dense start .05, outer (1, .5 n), local, k = 3, int8",
)
LRS_ELSEWHERE = (0.03, 0.05, 0.1, 0.2)


def learn(
    strategy: Strategy, setting: tuple[int, int], lr: float, seed: int, train: Objective, test: Objective
) -> dict[str, float] | None:
    """One run; None if it diverged."""
    batch_size, steps = setting
    result = simulate(
        strategy,
        Cluster(WORKERS, Uniform(1.0, 0.1)),
        work=Steps(number=steps, batch_size=batch_size),
        objective=train,
        optimizer=SGD(lr=lr, momentum=0.9, weight_decay=1e-4, milestones=(0.5, 0.75)),
        seed=seed,
        recording=Recording(evaluate_every=WORKERS * steps),
    )
    if result.ended != "done" or result.mean is None:
        return None
    sent = statistics.fmean(worker.bytes_sent for worker in result.workers)
    accuracy = train.accuracy(result.mean)
    assert accuracy is not None
    return {
        "test": test.loss(result.mean),
        "train": train.loss(result.mean),
        "accuracy": accuracy,
        "bytes": sent / train.numel / steps,
    }


def measure(
    seeds: tuple[int, ...], settings: dict[str, tuple[int, int]], done: dict[str, dict[str, dict[str, Any]]]
) -> Iterator[tuple[str, str, str, list[dict[str, float]]]]:
    """Setting, row, learning rate and its runs that have not diverged; of what is not done."""
    data = digits()
    assert data.test_x is not None
    assert data.test_y is not None
    train, test = mlp(data, hidden=HIDDEN), mlp(Classes(data.test_x, data.test_y), hidden=HIDDEN)
    for name, setting in settings.items():
        for row in ROWS if name == FIRST else ELSEWHERE:
            for lr in LRS if name == FIRST else LRS_ELSEWHERE:
                if f"{lr:g}" not in done.get(name, {}).get(row, {}):
                    runs = [learn(ROWS[row], setting, lr, seed, train, test) for seed in seeds]
                    yield name, row, f"{lr:g}", [run for run in runs if run is not None]


def best(runs: dict[str, list[dict[str, float]]], seeds: int) -> tuple[str, list[dict[str, float]]]:
    """Each row has a learning rate with which all seeds trained."""
    found = best_rate(runs, seeds)
    assert found is not None
    return found


def show(results: dict[str, Any]) -> None:
    """A table a setting."""
    for setting, rows in results["runs"].items():
        lines = []
        dense = statistics.fmean(run["bytes"] for run in best(rows["DDP"], results["seeds"])[1])
        for row, runs in sorted(rows.items(), key=lambda item: list(ROWS).index(item[0])):
            lr, of = best(runs, results["seeds"])
            sent = statistics.fmean(run["bytes"] for run in of)
            columns = [spread([run[kind] for run in of]) for kind in ("test", "train")]
            accuracy = statistics.fmean(run["accuracy"] for run in of)
            lines.append([row, lr, *columns, f"{accuracy:.4f}", f"{sent:.3f}", f"{dense / sent:.0f}"])
        print_table(setting, ("", "lr", "test loss", "train loss", "accuracy", "bytes", "fewer than DDP"), lines, caption=None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Few exchanges and outer steps on the digits.")
    parser.add_argument("--quick", action="store_true", help="one seed, the first setting")
    parser.add_argument("--table", action="store_true", help="show what was measured before")
    options = parser.parse_args()
    if options.table:
        show(json.loads((RESULTS / "outer.json").read_text()))
        return
    torch.set_num_threads(1)
    seeds = SEEDS[:1] if options.quick else SEEDS
    settings = dict(list(SETTINGS.items())[:1]) if options.quick else SETTINGS
    kept = RESULTS / "outer.json"
    done = json.loads(kept.read_text())["runs"] if kept.exists() and not options.quick else {}
    results: dict[str, Any] = {"seeds": len(seeds), "runs": done}
    for setting, row, lr, runs in measure(seeds, settings, done):
        results["runs"].setdefault(setting, {}).setdefault(row, {})[lr] = runs
        console.print(f"{setting}: {row}, lr {lr}")
        if not options.quick:
            write_results("outer", results)
    show(results)


if __name__ == "__main__":
    main()
