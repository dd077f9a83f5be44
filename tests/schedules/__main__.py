"""``python -m tests.schedules [--schedules N] [--first SEED] [--jobs N] [--selftest]``"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.schedules.choices import Choices
from tests.schedules.faults import FAULTS
from tests.schedules.gossip import Violation, run
from tests.schedules.shrink import shrunk

KEPT = Path(__file__).with_name("kept.json")
SELFTEST_SCHEDULES = 500


def violation_of(choices: Choices, fault: str | None = None) -> str | None:
    """What a schedule breaks; None if all holds."""
    protocol, options = FAULTS[fault] if fault is not None else (None, {})
    try:
        run(choices, *(() if protocol is None else (protocol,)), **options)
    except Violation as violation:
        return str(violation)
    return None


def _one(seed: int) -> tuple[int, str | None]:
    return seed, violation_of(Choices(seed))


def _found(job: tuple[str, int]) -> tuple[str, int | None, str]:
    """After how many schedules a fault is found."""
    fault, schedules = job
    for seed in range(schedules):
        violation = violation_of(Choices(seed), fault)
        if violation is not None:
            return fault, seed + 1, violation
    return fault, None, ""


def shrink(seed: int, fault: str | None = None) -> list[int]:
    """The choices of a failing seed, as few as still break the same invariant."""
    choices = Choices(seed)
    kind = _kind(violation_of(choices, fault))
    assert kind
    return shrunk(choices.made, lambda made: _kind(violation_of(Choices(recorded=made), fault)) == kind)


def _kind(violation: str | None) -> str:
    """A violation without its numbers."""
    return re.sub(r"[\d.]+", "…", violation or "")


def main() -> int:
    options = _options()
    console = Console()
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        if options.selftest:
            return _selftest(pool.imap_unordered(_found, [(fault, SELFTEST_SCHEDULES) for fault in FAULTS]), console)
        began_s = time.monotonic()
        seeds = range(options.first, options.first + options.schedules)
        failing: list[tuple[int, str]] = []
        columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(seeds))
            for seed, violation in pool.imap_unordered(_one, seeds, chunksize=20):
                progress.advance(task)
                if violation is not None:
                    failing.append((seed, violation))
                    progress.console.print(f"seed {seed}: {violation}")
        console.print(f"{len(seeds)} schedules in {time.monotonic() - began_s:.0f} s, {len(failing)} broke an invariant.")
    if failing:
        _keep(failing[0], console)
    return 1 if failing else 0


def _keep(failing: tuple[int, str], console: Console) -> None:
    """Shrink a schedule and write it down; tests/schedules/test_schedules.py runs it from then on."""
    seed, violation = failing
    console.print(f"Shrinking seed {seed} …")
    made = shrink(seed)
    kept = json.loads(KEPT.read_text())
    kept.append({"violation": violation, "choices": made})
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    console.print(f"{len(made)} choices are left, kept in {KEPT.name}.")


def _selftest(found: Iterator[tuple[str, int | None, str]], console: Console) -> int:
    table = Table("fault", "found after", "by", title="Faults put back, one at a time")
    missed = 0
    for fault, schedules, violation in sorted(found):
        missed += schedules is None
        table.add_row(fault, "not found" if schedules is None else f"{schedules} schedules", violation[:90])
    console.print(table)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--selftest", action="store_true", help="put known faults back and say how soon each is found")
    options = parser.parse_args()
    if options.schedules < 1 or options.jobs < 1:
        parser.error("--schedules and --jobs are numbers of at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
