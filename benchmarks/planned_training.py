"""Does what a plan recommends train sooner in reality than the present setting, and in the seconds that are predicted?

A short run of ``apsgd`` with default settings is measured and planned for; then the present and the recommended setting are
trained, one after the other, three seeds each, as real processes. Batches are padded to 25 ms in the mean, memoryless, so a
machine with fewer cores than workers still gives each its own speed; the learning rate is constant, as it is for a plan.
Seconds are those between the first epoch whose mean training loss is at most that where the plan measured, and the first that
is at a tenth of it.

    python -m benchmarks.planned_training [--quick]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import print_table, write_results
from benchmarks.reality import run

WORKERS = (2, 4)
SEEDS = (1, 2, 3)
TARGET = 0.1
PERIOD_S = 0.025
_EPOCHS = {2: 12, 4: 24}  # of 80 and 40 steps of a worker
_QUICK = 4  # epochs
SETTINGS = ("now", "recommended")


def seconds_to(folder: Path, losses: tuple[float, float]) -> float | None:
    """Seconds of training between the epochs at which the mean training loss is first at each of two; None if it never is."""
    times: list[float] = []
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    for loss in losses:
        reached = next((float(row["time/wall_s"]) for row in rows if float(row["train_loss"]) <= loss), None)
        if reached is None:
            return None
        times.append(reached)
    return times[1] - times[0]


def compare(workers: int, epochs: int, seeds: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Measure, plan, and train both settings."""
    common = ["recipe=digits_mlp", f"recipe.epochs={epochs}", "recipe.model.milestones=[]", "logger=none", "strategy=apsgd"]
    common += [f"trainer.devices={workers}", "cluster=random", f"cluster.period_s={PERIOD_S}"]
    first, plan = folder / f"measured_{workers}", folder / f"plan_{workers}"
    run("recipes.train", *common, f"hydra.run.dir={first}")
    run("recipes.plan", f"measured={first}", f"workers=[{workers}]", f"target={TARGET}", f"hydra.run.dir={plan}")
    found = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
    loss = found["noise"]["loss"]
    took: dict[str, list[float | None]] = {name: [] for name in SETTINGS}
    for seed in seeds:
        for name in SETTINGS:
            out = folder / f"{name}_{workers}_{seed}"
            setting = common if name == "now" else ["--config-dir", str(plan), "--config-name", "plan", "logger=none"]
            run("recipes.train", *setting, f"seed={seed}", f"cluster.seed={seed}", f"hydra.run.dir={out}")
            took[name].append(seconds_to(out, (loss, TARGET * loss)))
            print(workers, seed, name, took[name][-1], flush=True)
    return {
        "workers": workers,
        "epochs": epochs,
        "loss": loss,
        "recommended": found["recommended"]["strategy"],
        "setting": found["recommended"]["setting"],
        "predicted_s": {"now": found["now"]["time_s"], "recommended": found["recommended"]["best_time_s"]},
        "real_s": took,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four workers, one seed, few epochs")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            compare(workers, _QUICK if quick else _EPOCHS[workers], SEEDS[:1] if quick else SEEDS, Path(folder))
            for workers in (WORKERS[-1:] if quick else WORKERS)
        ]
    if not quick:
        print(write_results("planned_training", {"target": TARGET, "period_s": PERIOD_S, "rows": rows}))
    print_table(
        "Seconds between the loss where the plan measured and a tenth of it",
        ("workers", "setting", "predicted", "real, by seed", "real, median"),
        [
            [
                str(row["workers"]),
                f"{name}: {row['recommended'] if name == 'recommended' else 'apsgd'}",
                _spoken(row["predicted_s"][name]),
                ", ".join(_spoken(one) for one in row["real_s"][name]),
                _spoken(statistics.median(math.inf if one is None else one for one in row["real_s"][name])),
            ]
            for row in rows
            for name in SETTINGS
        ],
    )


def _spoken(seconds: float | None) -> str:
    return "never" if seconds is None or math.isinf(seconds) else f"{seconds:.1f}"


if __name__ == "__main__":
    main()
