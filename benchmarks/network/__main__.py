"""The command; ``--help`` lists its options."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster import unavailable
from benchmarks.harness import RESULTS, ROOT, console
from benchmarks.network import scenarios
from benchmarks.network.contenders import CONTENDERS
from benchmarks.network.report import plot, show
from benchmarks.network.results import Results
from benchmarks.network.runner import Run, execute
from benchmarks.network.scenarios import SCENARIOS
from benchmarks.network.workload import BATCH_SIZE, COMPUTE_S, WORKS
from recipes.commands import cleaning_up_on_sigterm

WORKERS, SEEDS, STEPS = 4, 5, 96
QUICK_STEPS = 32
QUICK_RATES = (1_000.0, 200.0)
QUICK_CONTENDERS = ("adpsgd", "adpsgd_int8", "no_exchanges", "adaptive_averaging", "ddp", "ddp_powersgd")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description="Time to accuracy on limited links.")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=["rates"], help="default: rates")
    parser.add_argument("--rates", nargs="+", type=float, metavar="MBIT", help="of the links; default: the scenario's")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="default: all")
    parser.add_argument("--seeds", type=int, help=f"how many; default: {SEEDS}")
    parser.add_argument("--work", choices=WORKS, default="mlp", help="default: mlp")
    parser.add_argument("--steps", type=int, help=f"of each worker; default: {STEPS}")
    parser.add_argument("--compute", type=float, default=COMPUTE_S, metavar="S", help=f"of a step; default: {COMPUTE_S}")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"one a host; default: {WORKERS}")
    parser.add_argument("--quick", action="store_true", help="one seed, few contenders, half the steps: a few minutes")
    parser.add_argument("--resume", action="store_true", help="go on with the file's runs instead of measuring them anew")
    parser.add_argument("--redraw", action="store_true", help="tables and pictures of the file's runs; measures nothing")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/network.json; outputs/… with --quick")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.seeds = arguments.seeds or (1 if quick else SEEDS)
    arguments.steps = arguments.steps or (QUICK_STEPS if quick else STEPS)
    arguments.contenders = arguments.contenders or list(QUICK_CONTENDERS if quick else CONTENDERS)
    if quick and arguments.rates is None and arguments.scenario == ["rates"]:
        arguments.rates = QUICK_RATES
    name = "network.json" if arguments.compute == COMPUTE_S else f"network_{1000 * arguments.compute:g}ms.json"
    arguments.output = arguments.output or (ROOT / "outputs" / "benchmarks" if quick else RESULTS) / name
    if (
        min(arguments.seeds, arguments.steps, arguments.compute, *(arguments.rates or [1])) <= 0
        or arguments.steps < 4
        or arguments.workers < 2
    ):
        parser.error("--seeds, --rates, --compute and --steps must be above 0, --steps at least 4 and --workers at least 2")
    return arguments


def planned(arguments: argparse.Namespace, scenario: str) -> list[tuple[Run, str]]:
    """The runs of a scenario, contenders and conditions alternating; each with the label of the undisturbed condition."""
    conditions = SCENARIOS[scenario].conditions(arguments.rates or SCENARIOS[scenario].rates)
    runs = []
    for seed in range(arguments.seeds):
        for contender in arguments.contenders:
            for condition in conditions:
                calm = next((c for c in conditions if c.rate_mbit == condition.rate_mbit), condition)
                run = Run(
                    scenario, arguments.work, condition, contender, seed, arguments.steps, arguments.workers, arguments.compute
                )
                runs.append((run, calm.label))
    return runs


def measure(arguments: argparse.Namespace, results: Results) -> int:
    """All runs that are not there yet; one that fails does not end the others.

    Returns:
        How many failed.
    """
    failed = 0
    plan = [entry for scenario in arguments.scenario for entry in planned(arguments, scenario)]
    missing = [entry for entry in plan if not results.has(entry[0])]
    if len(missing) < len(plan):
        console.print(f"{len(plan) - len(missing)} of {len(plan)} runs are there already.")
    first_s = time.monotonic()
    for number, (run, undisturbed) in enumerate(missing, start=1):
        mean_s = (time.monotonic() - first_s) / (number - 1) if number > 1 else 0.0
        left = f"; {_minutes(mean_s * (len(missing) - number + 1))} still to go" if mean_s else ""
        what = f"{run.condition.label}, {CONTENDERS[run.contender].label}, seed {run.seed}"
        console.print(f"{number}/{len(missing)} {what}{left}")
        began_s = time.monotonic()
        try:
            measured = execute(run)
        except RuntimeError as error:
            console.print(f"    failed: {error}", markup=False)
            failed += 1
            continue
        entry = results.add(run, undisturbed, measured, time.monotonic() - began_s)
        console.print(f"    {_outcome(entry)}")
    return failed


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _outcome(entry: dict[str, Any]) -> str:
    share = "no share: too few steps" if entry["share"] is None else f"share {entry['share']:.2f}"
    stopped = ", stopped" if entry["stopped"] else ""
    return f"{share}, accuracy {entry['curve']['accuracy'][-1]:.3f}, {entry['seconds']:.0f} s{stopped}"


def main() -> None:
    arguments = options()
    if not arguments.redraw and (reason := unavailable()):
        raise SystemExit(f"This machine cannot have a cluster: {reason}.")
    for name in list(arguments.contenders):
        if missing := CONTENDERS[name].missing:
            console.print(missing)
            arguments.contenders.remove(name)
    torch.set_num_threads(os.cpu_count() or 1)  # for the evaluation, while no worker runs
    settings = {
        "workers": arguments.workers,
        "batch_size": BATCH_SIZE,
        "compute_s": arguments.compute,
        "cap_s": scenarios.CAP_S,
    }
    results = Results(arguments.output, settings)
    results.load(any_settings=arguments.redraw)
    if arguments.redraw and not results.runs:
        raise SystemExit(f"{arguments.output} has no runs to draw.")
    if not (arguments.resume or arguments.redraw):
        for scenario in arguments.scenario:
            results.forget(scenario, arguments.work)
    began_s = time.monotonic()
    with cleaning_up_on_sigterm():
        failed = 0 if arguments.redraw else measure(arguments, results)
    console.print(f"Measured in {_minutes(time.monotonic() - began_s)}.")
    for scenario in arguments.scenario:
        runs = results.of(scenario, arguments.work)
        if not runs:
            continue
        show(runs)
        suffix = "".join(f"_{part}" for part in (scenario, arguments.work) if part not in ("rates", "mlp"))
        picture = arguments.output.with_name(f"{arguments.output.stem}{suffix}.png")
        plot(runs, scenario, picture)
        console.print(f"Written: {picture}")
    console.print(f"Written: {arguments.output}")
    if failed:
        raise SystemExit(f"{failed} runs failed; --resume makes them again.")


if __name__ == "__main__":
    main()
