"""Full stops at random moments: ``python -m tests.cluster.stops [--stops 200] [--seed 0]``.

A small job of three workers, again and again. Each one is stopped by an exception in a hook, a SIGTERM or a SIGKILL of one
worker, or ends by itself; where and when is drawn from the seed, so that a stop that went wrong can be had again
(``--only N``). Counts hangs, processes and files left, and checkpoints that do not load. The status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_gossip import ADPSGDStrategy
from recipes.processes import reserved_port
from tests.strategies.jobs import DIED, Job
from tests.strategies.models import Net, loader, trainer

WORKERS = 3
EPOCHS = 3
LONGEST_S = 60.0  # of a whole job: 3 s where nobody is stopped, TIMEOUT_S and 30 s of peer_timeout_s at worst
TIMEOUT_S = 20.0  # the strategy's timeout: one whose rank 0 has died before it served the store waits so long for it
DURATION_S = 2.0  # in which signals come: from the start of the processes until most jobs have ended
HOOKS = ("setup", "on_train_epoch_start", "training_step", "validation_step", "on_train_epoch_end", "on_train_end")
Kind = Literal["exception", "sigterm", "sigkill", "end"]


@dataclass(frozen=True)
class Plan:
    """One stop.

    Args:
        number: of the stop.
        kind: how.
        rank: whose.
        hook, call: an exception comes in this call of that hook.
        after_s: a signal comes so long after the workers were started, in seconds.
        options: of the strategy.
        loaders: processes of each worker's data loader.
    """

    number: int
    kind: Kind
    rank: int
    hook: str
    call: int
    after_s: float
    options: dict[str, Any]
    loaders: int


def plan(seed: int, number: int) -> Plan:
    """The stop of this number."""
    chance = random.Random(f"{seed}/{number}")
    kinds: tuple[Kind, ...] = ("exception", "sigterm", "sigkill", "end")
    hook = chance.choice(HOOKS)
    return Plan(
        number=number,
        kind=kinds[number % 4],
        rank=chance.randrange(WORKERS),
        hook=hook,
        call=chance.randrange(EPOCHS) if hook not in ("setup", "on_train_end") else 0,
        after_s=chance.uniform(0.0, DURATION_S),
        options=chance.choice([{}, {"on_peer_failure": "raise"}, {"checkpoint": "replicas"}, {"topology": "complete"}]),
        loaders=chance.choice([0, 0, 1]),
    )


@dataclass
class Result:
    """What became of it."""

    plan: Plan
    seconds: float = 0.0
    outcomes: list[str] = field(default_factory=list)
    hung: bool = False
    orphans: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    checkpoints: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Whether something happened that must not."""
        return self.hung or bool(self.orphans or self.files or self.broken)


class Raising(Callback):
    """An exception in one call of a hook, in user code."""

    def __init__(self, hook: str, call: int) -> None:
        self._calls = 0
        setattr(self, _CALLBACK.get(hook, hook), lambda *_, **__: self._called(call))

    def _called(self, call: int) -> None:
        self._calls += 1
        if self._calls > call:
            raise ArithmeticError("a stop by exception")


_CALLBACK = {"training_step": "on_train_batch_start", "validation_step": "on_validation_batch_start"}


def work(planned: Plan, folder: str) -> str:
    """One worker."""
    callbacks: list[Any] = [
        ModelCheckpoint(folder, filename="epoch", save_last=True, enable_version_counter=False),
        OnExceptionCheckpoint(folder, "stopped"),
    ]
    if planned.kind == "exception" and int(os.environ["RANK"]) == planned.rank:
        callbacks.append(Raising(planned.hook, planned.call))
    t = trainer(
        strategy=ADPSGDStrategy(timeout=timedelta(seconds=TIMEOUT_S), **planned.options), max_epochs=EPOCHS, callbacks=callbacks
    )
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if planned.loaders else {}
    t.fit(Net(), loader(480, 8, **options), loader(32, shuffle=False))
    return "trained"


def stop(planned: Plan) -> Result:
    """Run a job and stop it as planned."""
    result = Result(planned)
    with tempfile.TemporaryDirectory(prefix="gossip-stop-") as folder, reserved_port() as port:
        made = Job(work, planned, folder, workers=WORKERS, port=port)
        began_s = time.monotonic()
        pids = made.start_all()
        signals = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL}
        timer = threading.Timer(planned.after_s, _send, (pids[planned.rank], signals.get(planned.kind)))
        timer.start()
        family = _Family(pids)
        try:
            result.outcomes = [_short(outcome) for _, outcome in made.outcomes(LONGEST_S)]
        except AssertionError as error:
            result.hung, result.outcomes = True, [str(error)]
        finally:
            timer.cancel()
            timer.join()
            result.seconds = round(time.monotonic() - began_s, 1)
            made.end()
        result.orphans = family.left()
        _look_at_files(Path(folder), result)
    return result


class _Family:
    """The workers' processes and, seen while they train, those of their loaders."""

    def __init__(self, pids: list[int]) -> None:
        self._found: dict[int, psutil.Process] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(pids,), daemon=True)
        self._thread.start()

    def _look(self, pids: list[int]) -> None:
        while not self._ended.wait(0.2):
            for pid in pids:
                try:
                    self._found |= {child.pid: child for child in psutil.Process(pid).children(recursive=True)}
                except psutil.Error:  # noqa: PERF203 - it has ended
                    continue

    def left(self) -> list[str]:
        """Those that have outlived the workers by ten seconds (loaders look every five whether their parent lives)."""
        self._ended.set()
        self._thread.join()
        _, alive = psutil.wait_procs(list(self._found.values()), timeout=10)
        names = [f"{process.pid} {process.name()}" for process in alive]
        for process in alive:
            process.kill()
        return names


def _send(pid: int, number: signal.Signals | None) -> None:
    if number is not None and psutil.pid_exists(pid):
        os.kill(pid, number)


def _short(outcome: Any) -> str:
    if outcome in (DIED, "trained"):
        return str(outcome)
    return str(outcome).strip().rsplit("\n", 1)[-1][:160]  # of a traceback


def _look_at_files(folder: Path, result: Result) -> None:
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".ckpt", ".pt"):
            result.checkpoints += 1
            try:
                state = torch.load(path, weights_only=True)
                Net().load_state_dict(state.get("state_dict", state.get("model")))
            except Exception as error:  # noqa: BLE001 - it does not load, for whatever reason
                result.broken.append(f"{path.name}: {error}"[:200])
        elif path.is_file() and result.plan.kind != "sigkill":  # who is killed can take nothing away
            result.files.append(path.name)


def main(arguments: list[str]) -> int:
    """Run them all; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="only the stop of this number")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no stop after this time")
    options = parser.parse_args(arguments)
    numbers = range(options.stops) if options.only is None else [options.only]
    began_s, results = time.monotonic(), []
    for number in numbers:
        if time.monotonic() - began_s > options.seconds:
            break
        result = stop(plan(options.seed, number))
        results.append(result)
        mark = "BAD " if result.is_bad else "good"
        print(
            f"{mark} {json.dumps(asdict(result), default=str)}" if result.is_bad or options.only is not None else _line(result)
        )
        sys.stdout.flush()
    count = Counter(result.plan.kind for result in results)
    print(
        f"{len(results)} stops ({', '.join(f'{n} {kind}' for kind, n in sorted(count.items()))}):"
        f" {sum(r.hung for r in results)} hangs, {sum(len(r.orphans) for r in results)} orphans,"
        f" {sum(len(r.files) for r in results)} files left, {sum(len(r.broken) for r in results)} of"
        f" {sum(r.checkpoints for r in results)} checkpoints that do not load; longest {max(r.seconds for r in results)} s"
    )
    return int(any(result.is_bad for result in results))


def _line(result: Result) -> str:
    planned = result.plan
    where = planned.hook if planned.kind == "exception" else f"{planned.after_s:.1f} s"
    ends = " | ".join(outcome.split(":", 1)[0].rsplit(".", 1)[-1] for outcome in result.outcomes)
    return f"good {planned.number:3} {planned.kind:9} rank {planned.rank} {where:20} {result.seconds:5.1f} s  {ends}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
