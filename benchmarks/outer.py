"""What do few exchanges cost, and what do outer steps win back? Digits and Fashion-MNIST, in the simulator, three seeds.

Eight workers under virtual time whose links take none: exchanges are as frequent as asked. Every row is run with several inner
learning rates, and the one of the least mean test loss is shown, DDP's too. Bytes are those that one worker sends a step
and parameter. What has been measured is kept, so a run that is stopped goes on.

    python -m benchmarks.outer [--quick] [--table] [--fashion-mnist FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, best_rate, console, print_table, spread, write_results
from lightning_gossip import Outer
from lightning_gossip.errors import ConfigurationError
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
from recipes.vision.formats import fashion_mnist_arrays

WORKERS, HIDDEN, LOCAL_STEPS = 8, 64, 50
SEEDS = (0, 1, 2)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def gossip(**options: Any) -> ADPSGD:
    """On the complete graph, without a meeting."""
    return ADPSGD(topology="complete", work_sharing=False, at_rendezvous="evaluate", **options)


def few(**options: Any) -> ADPSGD:
    """With rounds of local steps, and without a dense start unless there is one."""
    return gossip(**{"local_steps": LOCAL_STEPS, "dense_share": 0.0, **options})


def exact(**options: Any) -> PeriodicAveraging:
    """The exact mean every so many steps."""
    return PeriodicAveraging(period=LOCAL_STEPS, at_rendezvous="evaluate", **options)


_FIRST: dict[str, Strategy] = {
    "DDP": AllReduce(),
    "gossip, 1 a step": gossip(),
    "gossip, .06 a step": few(),
    "gossip, .02 a step": few(exchanges_per_step=0.02),
    "outer (1, .5 n), local, k = 3": few(outer=Outer()),
    "outer (1, .5 n), local, k = 3, int8": few(outer=Outer(), wire="int8"),
    "outer (1, .5 n), all, k = 3": few(outer=Outer(momentum_of="all")),
    "outer (.7, .9 n), local, k = 3": few(outer=Outer(0.7, 0.9)),
    "outer (1, .5 n), local, k = 1": few(outer=Outer(), exchanges_per_step=0.02),
    "dense start .05, gossip .06, int8": few(wire="int8", dense_share=0.05),
    "noloco: dense start .05, outer (1, .5 n), local, k = 3, int8": few(outer=Outer(), wire="int8", dense_share=0.05),
    "noloco, H = 10": few(outer=Outer(), wire="int8", dense_share=0.05, local_steps=10),
    "exact mean": exact(),
    "exact mean, (1, .5 n)": exact(outer=Outer()),
    "exact mean, (.7, .9 n) = diloco": exact(outer=Outer(0.7, 0.9)),
    "exact mean, (1, .5 n), inner momentum averaged": exact(outer=Outer(), optimizer_state="average"),
    "exact mean, (.7, .5 h)": exact(outer=Outer(0.7, 0.5, nesterov=False)),
}
ROWS = {
    **_FIRST,
    "gossip, .06 a step, int8": few(wire="int8"),
    "outer (1, .5 n), all, k = 3, int8": few(outer=Outer(momentum_of="all"), wire="int8"),
    "dense start .01, gossip .06, int8": few(wire="int8", dense_share=0.01),
    "dense start .01, outer (1, .5 n), local, k = 3, int8": few(outer=Outer(), wire="int8", dense_share=0.01),
}


SOME = (  # rows of the long runs
    "DDP",
    "exact mean",
    "exact mean, (1, .5 n)",
    "exact mean, (.7, .9 n) = diloco",
    "exact mean, (1, .5 n), inner momentum averaged",
    "dense start .05, gossip .06, int8",
    "noloco: dense start .05, outer (1, .5 n), local, k = 3, int8",
)
HUNDREDTH = (  # the least bytes
    "DDP",
    "gossip, 1 a step",
    "gossip, .06 a step, int8",
    "gossip, .02 a step",
    "outer (1, .5 n), local, k = 3, int8",
    "outer (1, .5 n), all, k = 3, int8",
    "dense start .01, gossip .06, int8",
    "dense start .01, outer (1, .5 n), local, k = 3, int8",
    "exact mean",
    "exact mean, (1, .5 n)",
    "exact mean, (.7, .9 n) = diloco",
)
LARGE = (  # where the batches are
    "DDP",
    "dense start .01, outer (1, .5 n), local, k = 3, int8",
    "outer (1, .5 n), all, k = 3, int8",
    "exact mean, (1, .5 n)",
)


@dataclass(frozen=True)
class Setting:
    """What is trained, and how long.

    Args:
        data: gives the data set.
        batch_size: samples of a worker and step.
        steps: of each worker.
        lrs: learning rates to try.
        rows: of the table.
    """

    data: Callable[[], Classes]
    batch_size: int
    steps: int
    lrs: tuple[float, ...]
    rows: tuple[str, ...]


def settings(folder: Path) -> dict[str, Setting]:
    """By what the tables say above them.

    Args:
        folder: of Fashion-MNIST's files.
    """
    fashion = partial(fashion_mnist, folder)
    return {
        "8 samples a worker, 1,000 steps": Setting(digits, 8, 1000, (0.01, 0.03, 0.05, 0.1, 0.2), tuple(_FIRST)),
        "8 samples a worker, 4,000 steps": Setting(digits, 8, 4000, (0.03, 0.05, 0.1, 0.2), SOME),
        "Fashion-MNIST, 128 samples a worker, 800 steps": Setting(fashion, 128, 800, (0.02, 0.05, 0.1, 0.2), HUNDREDTH),
        "Fashion-MNIST, 32 samples a worker, 800 steps": Setting(fashion, 32, 800, (0.01, 0.02, 0.05, 0.1), HUNDREDTH),
        "Fashion-MNIST, 512 samples a worker, 800 steps": Setting(fashion, 512, 800, (0.1, 0.2, 0.4), LARGE),
        "Fashion-MNIST, 128 samples a worker, 3,200 steps": Setting(fashion, 128, 3200, (0.02, 0.05, 0.1), HUNDREDTH),
    }


def fashion_mnist(folder: Path) -> Classes:
    """60,000 images to train on, 10,000 to test; the bytes over 255.

    Raises:
        ConfigurationError: if the files are not there.
    """
    x, y, test_x, test_y = (
        torch.from_numpy(part) for train in (True, False) for part in fashion_mnist_arrays(folder, train=train)
    )
    return Classes(x.flatten(1).float() / 255.0, y.long(), test_x.flatten(1).float() / 255.0, test_y.long())


def learn(
    strategy: Strategy, setting: Setting, lr: float, seed: int, train: Objective, test: Objective
) -> dict[str, float] | None:
    """One run; None if it diverged."""
    steps = setting.steps
    result = simulate(
        strategy,
        Cluster(WORKERS, Uniform(1.0, 0.1)),
        work=Steps(number=steps, batch_size=setting.batch_size),
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
    seeds: tuple[int, ...], chosen: dict[str, Setting], done: dict[str, dict[str, dict[str, Any]]]
) -> Iterator[tuple[str, str, str, list[dict[str, float]]]]:
    """Setting, row, learning rate and its runs that have not diverged; of what is not done."""
    for name, setting in chosen.items():
        missing = [(row, lr) for row in setting.rows for lr in setting.lrs if f"{lr:g}" not in done.get(name, {}).get(row, {})]
        if not missing:
            continue
        try:
            data = setting.data()
        except ConfigurationError as error:
            console.print(f"{name}: left out. {error}", markup=False)
            continue
        assert data.test_x is not None
        assert data.test_y is not None
        train, test = mlp(data, hidden=HIDDEN), mlp(Classes(data.test_x, data.test_y), hidden=HIDDEN)
        for row, lr in missing:
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
    parser = argparse.ArgumentParser(description="Few exchanges and outer steps on digits and Fashion-MNIST.")
    parser.add_argument("--quick", action="store_true", help="one seed, the first setting")
    parser.add_argument("--table", action="store_true", help="show what was measured before")
    parser.add_argument("--fashion-mnist", type=Path, default=DEBIAN, metavar="FOLDER", help=f"default: {DEBIAN}")
    options = parser.parse_args()
    if options.table:
        show(json.loads((RESULTS / "outer.json").read_text()))
        return
    torch.set_num_threads(1)
    seeds = SEEDS[:1] if options.quick else SEEDS
    chosen = settings(options.fashion_mnist)
    if options.quick:
        chosen = dict(list(chosen.items())[:1])
    kept = RESULTS / "outer.json"
    done = json.loads(kept.read_text())["runs"] if kept.exists() and not options.quick else {}
    results: dict[str, Any] = {"seeds": len(seeds), "runs": done}
    for setting, row, lr, runs in measure(seeds, chosen, done):
        results["runs"].setdefault(setting, {}).setdefault(row, {})[lr] = runs
        console.print(f"{setting}: {row}, lr {lr}")
        if not options.quick:
            write_results("outer", results)
    show(results)


if __name__ == "__main__":
    main()
