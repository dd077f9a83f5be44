"""Do simulated epochs last as long as real ones?

Four workers train the digits, one of them 1, 4 and 10 times slower, with AD-PSGD and with Lightning's DDP. Then both are
simulated with the compute times that the real AD-PSGD run measured (DDP's own would hold its waiting), the same epoch and
loader. An epoch lasts from its first step's begin to its last step's end; the first one, in which nothing is known, is left
out.

    python -m benchmarks.reality [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, against, print_table, write_results
from recipes.record import RunRecord

FACTORS = (1, 4, 10)
STRATEGIES = ("adpsgd", "ddp")
AIM = 0.15
_TIMEOUT_S = 600


def run(module: str, *arguments: str) -> None:
    """One command of the recipes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
    )


def epoch_times_s(record: RunRecord) -> list[float]:
    """Of every epoch but the first, in seconds: what lies between two validations."""
    steps = sorted((s, e) for worker in record.workers for what, s, e, _ in worker.spans if what == "compute")
    ends_s = [row["time/wall_s"] for row in record.epochs]
    times = []
    for before_s, after_s in zip([0.0, *ends_s], ends_s, strict=False):
        inside = [(s, e) for s, e in steps if before_s <= s < after_s]
        times.append(max(e for _, e in inside) - min(s for s, _ in inside))
    return times[1:]


def compare(factor: int, epochs: int, folder: Path) -> list[dict[str, Any]]:
    """Real and simulated epoch times at one slowdown."""
    common = ["recipe=digits_mlp", f"recipe.epochs={epochs}", "recipe.data.batch_size=8", "cluster=one_slow"]
    common += [f"cluster.factor={factor}"]
    rows = []
    for strategy in STRATEGIES:
        real, simulated = folder / f"real_{strategy}_{factor}", folder / f"simulated_{strategy}_{factor}"
        run("recipes.train", *common, f"strategy={strategy}", "logger=none", f"hydra.run.dir={real}")
        measured = folder / f"real_{STRATEGIES[0]}_{factor}"
        arguments = (f"strategy={strategy}", "cluster=none", "objective=none", f"compute.record={measured}", "timeline=true")
        run("recipes.simulate", *common[:3], *arguments, f"hydra.run.dir={simulated}")
        seconds = [statistics.fmean(epoch_times_s(RunRecord.load(path))) for path in (real, simulated)]
        rows.append({"strategy": strategy, "factor": factor, "real_s": seconds[0], "simulated_s": seconds[1]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    epochs = 3 if parser.parse_args().quick else 6
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for factor in FACTORS for row in compare(factor, epochs, Path(folder))]
    for row in rows:
        row["off"] = row["simulated_s"] / row["real_s"] - 1.0
    cells = [
        (
            f"{row['strategy']}, {row['factor']}×",
            f"{row['real_s']:.2f}",
            f"{row['simulated_s']:.2f}",
            f"{row['off']:+.1%}",
            against(abs(row["off"]), AIM, at_most=True),
        )
        for row in rows
    ]
    print_table("Mean length of an epoch in seconds", ["", "real", "simulated", "off", f"aim: {AIM}"], cells)
    print(write_results("reality", {"epochs": epochs, "rows": rows}))


if __name__ == "__main__":
    main()
