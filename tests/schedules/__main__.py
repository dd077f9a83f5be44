"""``python -m tests.schedules [--protocols adpsgd membership] [--schedules N] [--first SEED] [--jobs N] [--selftest]``"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.schedules import (
    adpsgd,
    adpsgd_faults,
    failover,
    failover_acts,
    failover_faults,
    failover_islands,
    failover_many,
    membership,
    membership_faults,
)
from tests.schedules.choices import Choices
from tests.schedules.shrink import shrunk
from tests.schedules.violation import Violation

KEPT = Path(__file__).with_name("kept.json")
SELFTEST_SCHEDULES = 6000  # of the failover two are rare: schedules with long rests hide them
GUARDED_SCHEDULES = 200
GUARDED = failover_faults.GUARDED
RUN: dict[str, Callable[..., Any]] = {
    "adpsgd": adpsgd.run,
    "membership": membership.run,
    "failover": failover.run,
    "failover-in-rounds": failover.run_in_rounds,
    "failover-as-one-acts": failover_acts.run,
    "failover-of-many": failover_many.run,
    "failover-of-islands": failover_islands.run,
    "failover-of-islands-in-rounds": failover_islands.run_in_rounds,
}
FAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "adpsgd": adpsgd_faults.FAULTS,
    "membership": membership_faults.FAULTS,
    "failover": failover_faults.BY_THE_CLOCK,
    "failover-in-rounds": failover_faults.IN_ROUNDS,
    "failover-as-one-acts": failover_faults.AS_ONE_ACTS,
    "failover-of-many": failover_faults.OF_MANY,
    "failover-of-islands": failover_faults.OF_ISLANDS,
    "failover-of-islands-in-rounds": failover_faults.OF_ISLANDS_IN_ROUNDS,
}


def violation_of(protocol: str, choices: Choices, fault: str | None = None) -> str | None:
    """What a schedule breaks; None if all holds."""
    logging.disable(logging.CRITICAL)  # failures are what schedules are made of
    try:
        RUN[protocol](choices, **(FAULTS[protocol][fault] if fault is not None else {}))
    except Violation as violation:
        return str(violation)
    finally:
        logging.disable(logging.NOTSET)
    return None


def _one(job: tuple[str, int]) -> tuple[str, int, str | None]:
    protocol, seed = job
    return protocol, seed, violation_of(protocol, Choices(seed))


def _found(job: tuple[str, str]) -> tuple[str, str, int | None, str]:
    """After how many schedules a fault is found."""
    protocol, fault = job
    for seed in range(GUARDED_SCHEDULES if fault in GUARDED else SELFTEST_SCHEDULES):
        violation = violation_of(protocol, Choices(seed), fault)
        if violation is not None:
            return protocol, fault, seed + 1, violation
    return protocol, fault, None, ""


def shrink(protocol: str, seed: int, fault: str | None = None) -> list[int]:
    """The choices of a failing seed, as few as still break the same invariant."""
    choices = Choices(seed)
    kind = _kind(violation_of(protocol, choices, fault))
    assert kind
    return shrunk(choices.made, lambda made: _kind(violation_of(protocol, Choices(recorded=made), fault)) == kind)


def _kind(violation: str | None) -> str:
    """A violation without its numbers."""
    return re.sub(r"[\d.]+", "…", violation or "")


class _Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def _stop(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise _Stopped


def _leave_signals_to_the_first() -> None:
    """Of a process of the pool: a terminal sends Ctrl-C to all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Tally:
    """What has been run so far.

    Args:
        first: seed of each protocol.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._run: Counter[str] = Counter()
        self.broken: list[tuple[str, int, str]] = []

    def note(self, protocol: str, seed: int, violation: str | None) -> None:
        """One schedule has been run."""
        self._run[protocol] += 1
        if violation is not None:
            self.broken.append((protocol, seed, violation))

    def lines(self) -> Iterator[str]:
        """How many of each protocol, from which seed, and which broke an invariant."""
        for protocol, count in sorted(self._run.items()):
            seeds = sorted(seed for broken, seed, _ in self.broken if broken == protocol)
            broke = "none broke an invariant" if not seeds else f"{len(seeds)} broke an invariant: seeds {seeds}"
            yield f"{protocol}: {count} schedules from seed {self._first}, {broke}."


def main() -> int:
    options = _options()
    console = Console()
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(options.jobs, _leave_signals_to_the_first) as pool:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        if options.selftest:
            jobs = [(protocol, fault) for protocol in options.protocols for fault in FAULTS[protocol]]
            return _selftest(pool.imap_unordered(_found, jobs), console)
        began_s = time.monotonic()
        count = -(-options.schedules // len(options.protocols))
        seeds = range(options.first, options.first + count)
        schedules = [(protocol, seed) for seed in seeds for protocol in options.protocols]
        tally = Tally(options.first)
        columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        stopped = False
        try:
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                task = progress.add_task("", total=len(schedules))
                for protocol, seed, violation in pool.imap_unordered(_one, schedules, chunksize=20):
                    progress.advance(task)
                    tally.note(protocol, seed, violation)
                    if violation is not None:
                        progress.console.print(f"{protocol}, seed {seed}: {violation}")
        except _Stopped:
            stopped = True
        for line in tally.lines():
            console.print(line, soft_wrap=True)
        ended = f"Stopped before {len(schedules)} schedules were run" if stopped else f"{len(schedules)} schedules"
        console.print(f"{ended}: {time.monotonic() - began_s:.0f} s.")
    if tally.broken and not stopped:
        _keep(tally.broken[0], console)
    return 1 if tally.broken or stopped else 0


def _keep(failing: tuple[str, int, str], console: Console) -> None:
    """Shrink a schedule and write it down; tests/schedules/test_schedules.py runs it from then on."""
    protocol, seed, violation = failing
    console.print(f"Shrinking {protocol}, seed {seed} …")
    made = shrink(protocol, seed)
    kept = json.loads(KEPT.read_text())
    kept.append({"protocol": protocol, "violation": violation, "choices": made})
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    console.print(f"{len(made)} choices are left, kept in {KEPT.name}.")


def _selftest(found: Iterator[tuple[str, str, int | None, str]], console: Console) -> int:
    table = Table("protocol", "fault", "found after", "by", title="Faults put back, one at a time")
    missed = 0
    for protocol, fault, schedules, violation in sorted(found):
        missed += schedules is None and fault not in GUARDED
        by = violation[:90] if schedules is not None else GUARDED.get(fault, "")
        table.add_row(protocol, fault, "not found" if schedules is None else f"{schedules} schedules", by)
    console.print(table)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__)
    parser.add_argument("--protocols", nargs="+", default=tuple(RUN), choices=tuple(RUN), help="which (all)")
    parser.add_argument("--schedules", type=int, default=100_000, help="of all protocols together (100,000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--selftest", action="store_true", help="put known faults back and say how soon each is found")
    options = parser.parse_args()
    if options.schedules < 1 or options.jobs < 1:
        parser.error("--schedules and --jobs are numbers of at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
