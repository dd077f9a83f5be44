"""The command; ``--help`` lists its options."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, ROOT, console
from benchmarks.time_to_loss.contenders import KNOWN
from benchmarks.time_to_loss.plan import HOSTS, SEEDS, planned
from benchmarks.time_to_loss.report import plot, reported, show
from benchmarks.time_to_loss.results import Results
from benchmarks.time_to_loss.runs import Run, execute
from benchmarks.time_to_loss.task import SCENARIOS, Task
from benchmarks.time_to_loss.tasks import TASKS


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_loss", description="Time to DDP's loss.")
    parser.add_argument("--task", choices=tuple(TASKS), default="char_gpt", help="default: char_gpt")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, one seed: some minutes; in outputs/")
    parser.add_argument("--redraw", action="store_true", help="tables and pictures of the file's runs; trains nothing")
    parser.add_argument("--minutes", type=float, help="begin no run after so many; the next call goes on. Default: no end")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/time_to_loss….json")
    arguments = parser.parse_args()
    if arguments.minutes is not None and arguments.minutes <= 0:
        parser.error("--minutes must be above 0")
    arguments.task = TASKS[arguments.task]
    folder = ROOT / "outputs" / "benchmarks" if arguments.quick else RESULTS
    arguments.output = arguments.output or folder / f"{arguments.task.file}.json"
    return arguments


def measure(results: Results, task: Task, *, seeds: tuple[int, ...], minutes: float | None) -> None:
    """All runs that are not there yet."""
    began_s, made = time.monotonic(), 0
    while missing := [run for run in planned(results, task, seeds=seeds) if not results.has(run)]:
        passed_s = time.monotonic() - began_s
        if minutes is not None and passed_s > 60 * minutes:
            console.print(f"{len(missing)} runs or more are left; the same command goes on with them.")
            return
        left = f"; about {passed_s / made * len(missing) / 60:.0f} min to go" if made else ""
        console.print(f"{len(missing)} runs left{left}: {_said(missing[0])}")
        start_s = time.monotonic()
        entries = list(execute(missing[0], task))
        results.add(entries)
        made += 1
        loss = entries[0]["curve"]["loss"][-1]
        console.print(f"    loss {loss:.4f}, {entries[0]['ended']}, {time.monotonic() - start_s:.0f} s")


def _said(run: Run) -> str:
    condition = run.condition
    where = f"{condition.hosts} hosts" + ("" if run.waits else f", {condition.rate_mbit:g} Mb/s, {condition.scenario}")
    return f"{KNOWN[run.contender].label}, lr {run.lr:g}, × {run.length:g}, {where}, seed {run.seed}"


def main() -> None:
    arguments = options()
    torch.set_num_threads(1)
    task: Task = arguments.task
    if arguments.quick:
        task = replace(task, steps=task.steps // 10)
    results = Results(arguments.output, None if arguments.redraw else task.settings())
    if arguments.redraw and not results.runs:
        raise SystemExit(f"{arguments.output} has no runs to draw.")
    if not arguments.redraw:
        measure(results, task, seeds=SEEDS[:1] if arguments.quick else SEEDS, minutes=arguments.minutes)
    for hosts in HOSTS:
        if not reported(results, hosts=hosts):
            continue
        show(results, hosts)
        for scenario in SCENARIOS:
            if reported(results, hosts=hosts, scenario=scenario):
                suffix = "" if (hosts, scenario) == (HOSTS[0], "equal") else f"_{hosts}_{scenario}"
                picture = arguments.output.with_name(f"{arguments.output.stem}{suffix}.png")
                plot(results, hosts, scenario, picture)
                console.print(f"Written: {picture}")


if __name__ == "__main__":
    main()
