"""Kills, freezes, cut and slow links, and returns, against one job of four hosts.

    python -m tests.cluster.chaos --seed 1 --minutes 3                # rank 0 has the store, and is a victim as all
    python -m tests.cluster.chaos --seed 1 --minutes 3 --store-apart  # on one more host, which nothing happens to

The schedule depends on the seed, the minutes and the number of workers alone; it is printed as it happens, so that a seed that
failed can be run again. At the end: whoever did not come too late has ended all epochs with the same model, the checkpoint
loads without this package, every sample of every epoch was trained on, nobody hangs, and nothing is left of it.

Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster import remains
from benchmarks.harness import console, print_table
from recipes.commands import cleaning_up_on_sigterm, one_sentence
from tests.cluster.job import Job, job
from tests.cluster.schedule import Trouble, schedule

WORKERS, RATE_MBIT, SLOWER = 4, 1000.0, 100.0
_STEP_S, _SAMPLES, _BATCH = 0.02, 1200, 8
_BUSY = 0.35  # share of the schedule's time that the epochs would take undisturbed; the rest is waits and returns
_LOOK_S = 0.2
_GRACE_S = 90.0  # after the last trouble, beside what the epochs take
_LATE = r"comes too late|has heard no member"  # said by a worker that came back to a job that had ended


@dataclass
class Outcome:
    """Of one seed.

    Attributes:
        failures: what is wrong, in words.
        troubles: how often each kind happened.
    """

    seed: int
    failures: list[str] = field(default_factory=list)
    troubles: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    epochs: int = 0
    seconds: float = 0.0
    accuracy: float = float("nan")


def run(seed: int, minutes: float, folder: Path, say: Callable[[str], None], *, store_apart: bool = False) -> Outcome:
    """One job under one schedule.

    Args:
        seed, minutes: of the schedule.
        folder: of logs and records.
        say: told what happens, line by line.
        store_apart: whether the store is on a host of its own.
    """
    outcome = Outcome(seed)
    troubles = schedule(seed, workers=WORKERS, length_s=60 * minutes)
    ideal_s = _SAMPLES / _BATCH * _STEP_S / WORKERS
    outcome.epochs = max(3, round(_BUSY * 60 * minutes / ideal_s))
    options: dict[str, Any] = {"workers": WORKERS, "rate_mbit": RATE_MBIT, "samples": _SAMPLES, "step_s": _STEP_S}
    options["store_apart"] = store_apart
    say(f"seed {seed}: {len(troubles)} troubles in {minutes:g} minutes, {outcome.epochs} epochs; logs in {folder}")
    with job(folder, epochs=outcome.epochs, **options) as running:
        hosts = [host.namespaces.name for host in running.net.hosts]
        running.await_epoch(0)
        start_s = time.monotonic()
        _Run(running, outcome, start_s, say).follow(troubles, deadline_s=60 * minutes + _GRACE_S + 3 * outcome.epochs * ideal_s)
        outcome.seconds = time.monotonic() - start_s
        _check(running, outcome)
    if left := [name for name in hosts if remains(name)]:
        outcome.failures.append(f"hosts that are left: {left}")
    say(f"seed {seed}: {'; '.join(outcome.failures) or 'all is well'}")
    return outcome


class _Run:
    def __init__(self, running: Job, outcome: Outcome, start_s: float, say: Callable[[str], None]) -> None:
        self._job = running
        self._outcome = outcome
        self._start_s = start_s
        self._tell = say
        self._troubled: set[int] = set()
        self._known: set[int] = set()  # processes whose end has been looked at
        self._awaited: set[int] = set()  # workers that come back when another one says where to

    def follow(self, troubles: Sequence[Trouble], *, deadline_s: float) -> None:
        """Let all of it happen, and wait for the job's end."""
        begins = [(trouble.at_s, True, trouble) for trouble in troubles]
        ends = [(trouble.until_s, False, trouble) for trouble in troubles]
        for at_s, begins_now, trouble in sorted([*begins, *ends]):
            if not self._until(at_s):
                break
            (self._begin if begins_now else self._end)(trouble)
        for worker in sorted(self._troubled):
            self._heal(worker)
        if self._until(deadline_s):
            hung = [worker for worker, process in self._job.workers.items() if process.runs]
            self._outcome.failures.append(f"workers {hung} hang")
            for worker in hung:
                self._job.workers[worker].signal(signal.SIGUSR1)  # their stacks go to their logs
                self._job.workers[worker].await_line("most recent call first", 5.0)

    def _until(self, at_s: float) -> bool:
        """Whether anybody still trains at that time; returns at once when nobody does."""
        while True:
            self._look()
            running = [process.sentinel for process in self._job.workers.values() if process.runs]
            left_s = self._start_s + at_s - time.monotonic()
            for worker in sorted(self._awaited):
                self._come_back(worker)
            if not running or left_s <= 0:
                return bool(running)
            wait(running, min(left_s, _LOOK_S) if self._awaited else left_s)

    def _look(self) -> None:
        for worker, process in self._job.workers.items():
            if process.runs or process.pid in self._known:
                continue
            self._known.add(process.pid)
            code = process.wait(10.0)
            self._say(f"worker {worker} has ended with {code}")
            if code not in (0, -signal.SIGKILL) and worker not in self._troubled and not process.said(_LATE):
                self._outcome.failures.append(f"worker {worker} failed although nothing was done to it: {process.last_words()}")

    def _begin(self, trouble: Trouble) -> None:
        net, host, process = self._job.net, self._job.hosts[trouble.worker], self._job.workers[trouble.worker]
        if not process.runs or self._is_over:
            return self._say(f"({trouble}: {'it has ended' if not process.runs else 'the job is over'})")
        self._troubled.add(trouble.worker)
        self._outcome.troubles[trouble.kind] += 1
        self._say(str(trouble))
        if trouble.kind in ("cut", "power"):
            net.cut(host)
        if trouble.kind in ("kill", "power"):
            process.kill()
        if trouble.kind == "stop":
            process.stop()
        if trouble.kind == "part":
            net.part([host])
        if trouble.kind == "slow":
            net.set_rate(host, RATE_MBIT / SLOWER)
        return None

    def _end(self, trouble: Trouble) -> None:
        if trouble.worker in self._troubled:
            self._heal(trouble.worker)

    def _heal(self, worker: int) -> None:
        """As if nothing had been; its process anew if it has ended, and the others have not."""
        process, host = self._job.workers[worker], self._job.hosts[worker]
        self._job.net.heal(host)
        self._job.net.set_rate(host, RATE_MBIT)
        process.go_on()
        self._look()
        self._troubled.discard(worker)
        comes_back = not process.runs and process.wait(10.0) != 0 and self._others_train(worker)
        if comes_back:
            self._come_back(worker)
        else:
            self._say(f"worker {worker} is healed")

    def _come_back(self, worker: int) -> None:
        """By rank 0's address, or the one that another worker has said, as users would."""
        self._awaited.discard(worker)
        if not self._others_train(worker):
            return self._say(f"worker {worker} does not come back: nobody trains")
        by = self._job.way_back(worker)
        if by is None:
            self._awaited.add(worker)
            return None
        self._job.start(worker, by=by)
        return self._say(f"worker {worker} comes back by {by[0]}")

    @property
    def _is_over(self) -> bool:
        """Whether somebody has come to the job's end: who is outside still has nobody to be taken in by."""
        return any(not process.runs and process.wait(10.0) == 0 for process in self._job.workers.values())

    def _others_train(self, worker: int) -> bool:
        return any(process.runs for other, process in self._job.workers.items() if other != worker)

    def _say(self, what: str) -> None:
        self._tell(f"{time.monotonic() - self._start_s:8.2f} s  {what}")


def _check(running: Job, outcome: Outcome) -> None:
    codes = {worker: process.wait(10.0) for worker, process in running.workers.items() if not process.runs}
    results = [running.result(worker) for worker, code in codes.items() if code == 0]
    outcome.ended = len(results)
    failures = outcome.failures
    for worker, code in codes.items():
        process = running.workers[worker]
        if code != 0 and not process.said(_LATE):
            failures.append(f"worker {worker} ended with {code}: {process.last_words()}")
    if len(results) < WORKERS // 2:
        failures.append(f"{len(results)} workers have ended their training")
    if results:
        outcome.accuracy = results[0]["accuracy"]
    for result in results:
        if (result["epochs"], result["model"]) != (outcome.epochs, results[0]["model"]):
            failures.append(f"other epochs or another model: {result}")
    if not any(process.runs for process in running.workers.values()):
        failures += [f"processes left on the hosts: {left}" for left in [running.orphans()] if left]
    if missing := running.missing():
        failures.append(f"samples never trained on, by epoch: {missing}")
    state = torch.load(running.folder / "last.ckpt", weights_only=True)
    if state["epoch"] != outcome.epochs - 1 or not all(value.isfinite().all() for value in state["state_dict"].values()):
        failures.append(f"the checkpoint is of epoch {state['epoch']}, or not finite")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the number of seeds that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one run each")
    parser.add_argument("--minutes", type=float, default=3.0, help="length of each schedule")
    parser.add_argument("--store-apart", action="store_true", help="the store on a host of its own, not in rank 0")
    parser.add_argument("--logs", type=Path, help="keep all logs and records here, not only those of runs that failed")
    options = parser.parse_args(arguments)
    outcomes = []
    with one_sentence(), cleaning_up_on_sigterm():
        for seed in options.seed:
            with ExitStack() as stack:
                folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-")) if options.logs is None else options.logs / str(seed)
                folder.mkdir(parents=True, exist_ok=True)
                outcomes.append(run(seed, options.minutes, folder, console.print, store_apart=options.store_apart))
                if options.logs is None and not outcomes[-1].failures:
                    stack.callback(_remove, folder)
    rows = [
        [
            str(outcome.seed),
            ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.troubles.items())),
            str(outcome.epochs),
            f"{outcome.seconds:.0f}",
            f"{outcome.ended}/{WORKERS}",
            f"{outcome.accuracy:.3f}",
            "; ".join(failure.split("\n")[0] for failure in outcome.failures) or "none",
        ]
        for outcome in outcomes
    ]
    print_table("Chaos", ("seed", "troubles", "epochs", "seconds", "ended", "accuracy", "failures"), rows)
    return sum(bool(outcome.failures) for outcome in outcomes)


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
