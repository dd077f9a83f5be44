"""Full stops at random moments: ``python -m tests.cluster.stops [--stops 200] [--seed 0]``.

A small job of three workers, again and again. One worker of each is stopped: by an exception in a hook, by SIGTERM or SIGKILL
at a random time, or by SIGKILL in a phase of its training (set-up, first step, rendezvous, saving, validation, end); or nobody
is. Where and when is drawn from the seed, so that a stop that went wrong can be had again (``--only N``). Counted are hangs,
processes and files that are left, checkpoints that do not load, samples that an ended epoch lacks, and samples that those that
were not killed trained on twice in an epoch. The status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_gossip import ADPSGDStrategy
from recipes.processes import reserved_port
from tests.strategies.jobs import DIED, Job, kill_myself
from tests.strategies.models import Net, loader, trainer

WORKERS = 3
EPOCHS = 3
SAMPLES = 480
LONGEST_S = 60.0  # of a whole job: 1 to 2 s where nobody is stopped, twice TIMEOUT_S and 30 s of peer_timeout_s at worst
TIMEOUT_S = 8.0  # the strategy's timeout: one whose rank 0 has died before it served the store waits so long for it
DURATION_S = 2.0  # in which signals come: from the start of the processes until most jobs have ended
_LATER_S = 0.03  # of a phase, until which one that is killed in it goes on
HOOKS = {  # of callbacks
    "setup": "setup",
    "epoch": "on_train_epoch_start",
    "step": "on_train_batch_start",
    "rendezvous": "on_train_batch_end",  # of the epoch's last batch
    "validation": "on_validation_batch_start",
    "epoch's end": "on_train_epoch_end",
    "saving": "on_save_checkpoint",
    "end": "on_train_end",
    "teardown": "teardown",
}
ONCE = ("setup", "end", "teardown")
Kind = Literal["exception", "sigterm", "sigkill", "killed", "end"]


@dataclass(frozen=True)
class Plan:
    """One stop.

    Args:
        number: of the stop.
        kind: how; "sigkill" at some time, "killed" in a phase.
        rank: whose.
        phase, call: an exception comes, or it is killed, in this call of the phase's hook.
        later_s: it is killed so long after that call has begun, in seconds.
        after_s: a signal comes so long after the workers were started, in seconds.
        options: of the strategy.
        loaders: processes of each worker's data loader.
    """

    number: int
    kind: Kind
    rank: int
    phase: str
    call: int
    later_s: float
    after_s: float
    options: dict[str, Any]
    loaders: int


def plan(seed: int, number: int) -> Plan:
    """The stop of this number."""
    chance = random.Random(f"{seed}/{number}")
    kinds: tuple[Kind, ...] = ("exception", "sigterm", "sigkill", "killed", "end")
    phase = chance.choice(list(HOOKS))
    return Plan(
        number=number,
        kind=kinds[number % len(kinds)],
        rank=chance.randrange(WORKERS),
        phase=phase,
        call=0 if phase in ONCE else chance.randrange(EPOCHS),
        later_s=chance.choice([0.0, chance.uniform(0.0, _LATER_S)]),
        after_s=chance.uniform(0.0, DURATION_S),
        options=chance.choice([{}, {"on_peer_failure": "raise"}, {"checkpoint": "replicas"}, {"topology": "complete"}]),
        loaders=chance.choice([0, 0, 1]),
    )


@dataclass
class Result:
    """What became of it.

    Attributes:
        missing: samples that nobody trained on in an epoch that somebody has ended.
        twice: samples that those that were not killed trained on more than once in an epoch.
    """

    plan: Plan
    seconds: float = 0.0
    outcomes: list[str] = field(default_factory=list)
    hung: bool = False
    orphans: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    checkpoints: int = 0
    broken: list[str] = field(default_factory=list)
    missing: int = 0
    twice: int = 0

    @property
    def is_bad(self) -> bool:
        """Whether something happened that must not."""
        return self.hung or bool(self.orphans or self.files or self.broken or self.missing or self.twice)


class Stopping(Callback):
    """An exception in a call of a phase's hook, or the death of this process soon after it has begun."""

    def __init__(self, planned: Plan) -> None:
        self._plan = planned
        self._calls = 0
        setattr(self, HOOKS[planned.phase], self._called)

    def _called(self, trainer: Trainer, *_: object, **__: object) -> None:
        if self._plan.phase == "rendezvous" and not trainer.is_last_batch:
            return
        self._calls += 1
        if self._calls != self._plan.call + 1:
            return
        if self._plan.kind == "exception":
            raise ArithmeticError("a stop by exception")
        if self._plan.later_s == 0.0:
            kill_myself()
        later = threading.Timer(self._plan.later_s, kill_myself)
        later.daemon = True
        later.start()


class Recording(Callback):
    """What a worker trains on; written before anybody is told that the batch is finished."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / os.environ["RANK"]

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._samples = batch[2].tolist()

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self._write(trainer.current_epoch, self._samples)

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._write(trainer.current_epoch, None)  # it has ended

    def _write(self, epoch: int, samples: list[int] | None) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps([epoch, samples]) + "\n")


def work(planned: Plan, records: Path, folder: Path) -> str:
    """One worker."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks: list[Any] = [
        Recording(records),
        ModelCheckpoint(folder, filename="epoch", save_last=True, enable_version_counter=False),
        OnExceptionCheckpoint(str(folder), "stopped"),
    ]
    if planned.kind in ("exception", "killed") and int(os.environ["RANK"]) == planned.rank:
        callbacks.append(Stopping(planned))
    t = trainer(
        strategy=ADPSGDStrategy(timeout=timedelta(seconds=TIMEOUT_S), **planned.options), max_epochs=EPOCHS, callbacks=callbacks
    )
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if planned.loaders else {}
    t.fit(Net(), loader(SAMPLES, 8, **options), loader(32, shuffle=False))
    return "trained"


def stop(planned: Plan) -> Result:
    """Run a job and stop it as planned."""
    result = Result(planned)
    with (
        tempfile.TemporaryDirectory(prefix="gossip-stop-") as folder,
        tempfile.TemporaryDirectory(prefix="gossip-stop-records-") as records,
        reserved_port() as port,
    ):
        made = Job(work, planned, Path(records), Path(folder), workers=WORKERS, port=port)
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
        _look_at_samples(Path(records), result)
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
        elif path.is_file() and DIED not in result.outcomes:  # who is killed can take nothing away
            result.files.append(path.name)


def _look_at_samples(folder: Path, result: Result) -> None:
    trained = [Counter[int]() for _ in range(EPOCHS)]
    by_survivors = [Counter[int]() for _ in range(EPOCHS)]
    ended = set[int]()
    for rank, outcome in enumerate(result.outcomes):
        path = folder / str(rank)
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []  # the last line may be half of one
        for epoch, samples in map(json.loads, whole):
            if samples is None:
                ended.add(epoch)
                continue
            trained[epoch].update(samples)
            if outcome != DIED:
                by_survivors[epoch].update(samples)
    result.missing = sum(SAMPLES - len(trained[epoch]) for epoch in ended)
    result.twice = sum(times > 1 for epoch in by_survivors for times in epoch.values())


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
        f" {sum(r.checkpoints for r in results)} checkpoints that do not load, {sum(r.missing for r in results)} samples"
        f" missing, {sum(r.twice for r in results)} trained on twice; longest {max(r.seconds for r in results)} s"
    )
    return int(any(result.is_bad for result in results))


def _line(result: Result) -> str:
    planned = result.plan
    where = planned.phase if planned.kind in ("exception", "killed") else f"{planned.after_s:.1f} s"
    ends = " | ".join(outcome.split(":", 1)[0].rsplit(".", 1)[-1] for outcome in result.outcomes)
    return f"good {planned.number:3} {planned.kind:9} rank {planned.rank} {where:20} {result.seconds:5.1f} s  {ends}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
