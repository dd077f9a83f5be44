"""Whether a worker that has trained ends well on a busy machine: ``make exits``.

Many short fits, started in each of Lightning's ways, under every strategy, while busy loops keep the machine at a load of 12.
Each process has to end with status 0. What is looked for shows when a thread is not scheduled for a while at the end of the
process (:mod:`lightning_gossip.runtime.process_end`), so it does not show on a quiet machine.

Importing torch takes longer than the fit. So the processes that torchrun would start, and the scripts whose workers are forked,
are forked from one that has imported it, and leave through the whole end of the interpreter as a script does; ``popen``,
``spawn`` and a real torchrun import it anew each time, and are fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

STRATEGIES = ("adpsgd", "dpsgd", "apsgd", "periodic_averaging", "adaptive_averaging", "qsgd")
SHARES = {"as torchrun": 0.4, "fork": 0.4, "spawn": 0.08, "popen": 0.08, "torchrun": 0.04}  # of all fits
_DEADLINE_S = 300  # of one fit on the busy machine
ROOT = Path(__file__).parents[1]


def fit(strategy: str) -> None:
    """A user's script."""
    from lightning.pytorch import Trainer

    import lightning_gossip  # noqa: F401 - registers the strategies
    from tests.strategies.models import Net, loader

    Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Net(), loader(40, 4), loader(16, shuffle=False))


def serve(launcher: str, strategy: str, count: int) -> None:
    """Fork one fit after the other from this process, and print how the processes of each have ended, a line a fit."""
    import torch

    import lightning_gossip  # noqa: F401
    import tests.strategies.models  # noqa: F401

    for _ in range(count):
        with tempfile.TemporaryFile() as output:
            pids = []
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            for rank in range(2 if launcher == "as torchrun" else 1):
                pid = os.fork()
                if pid == 0:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                    signal.alarm(_DEADLINE_S)
                    torch.set_num_threads(1)
                    if launcher == "as torchrun":
                        os.environ.update(_torchrun(rank, port))
                        fit(strategy)
                    else:
                        fit(f"{strategy}_{launcher}")
                    sys.exit(0)
                pids.append(pid)
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            output.seek(0)
            said = output.read().decode(errors="replace") if any(statuses) else ""
        print(json.dumps({"statuses": statuses, "said": said}), flush=True)


def _torchrun(rank: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "exits",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def run(launcher: str, strategy: str, count: int) -> list[tuple[list[int], str]]:
    """Exit statuses and output of so many fits."""
    module = [sys.executable, "-m", "tests.exits"]
    if launcher in ("as torchrun", "fork"):
        return list(_served([*module, "--serve", launcher, strategy, str(count)], count))
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.exits"]
        command = [*start, "--fit", strategy]
    else:
        command = [*module, "--fit", strategy if launcher == "popen" else f"{strategy}_{launcher}"]
    return [_ended(command) for _ in range(count)]


def _served(command: list[str], count: int) -> Iterator[tuple[list[int], str]]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = server.stdout.read().splitlines()
    for line in lines:
        ended = json.loads(line)
        yield ended["statuses"], ended["said"]
    for _ in range(count - len(lines)):
        yield [server.returncode or -1], "the process that forks the fits has ended"


def _ended(command: list[str]) -> tuple[list[int], str]:
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as late:
        return [-signal.SIGALRM], (late.stderr or b"").decode(errors="replace")
    return [ended.returncode], ended.stdout + ended.stderr


@contextmanager
def busy(load: int) -> Iterator[None]:
    """Keep the machine busy with so many loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=300, help="how many, of all strategies and ways to start (300)")
    parser.add_argument("--load", type=int, default=12, help="busy loops beside them (12)")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES, help="which (all)")
    parser.add_argument("--launchers", nargs="+", default=tuple(SHARES), choices=tuple(SHARES), help="which (all)")
    parser.add_argument("--fit", metavar="STRATEGY", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.fit:
        fit(asked.fit)
        return 0
    if asked.serve:
        launcher, strategy, count = asked.serve
        serve(launcher, strategy, int(count))
        return 0
    began_s, failures, made = time.monotonic(), 0, 0
    jobs = [
        (launcher, strategy, max(1, round(asked.fits * share / len(asked.strategies))))
        for launcher, share in SHARES.items()
        if launcher in asked.launchers
        for strategy in asked.strategies
    ]
    with busy(asked.load), ThreadPoolExecutor(4) as pool:
        for (launcher, strategy, _), ended in zip(jobs, pool.map(lambda job: run(*job), jobs), strict=True):
            bad = [(statuses, said) for statuses, said in ended if any(statuses)]
            made, failures = made + len(ended), failures + len(bad)
            minutes = (time.monotonic() - began_s) / 60
            print(f"{minutes:5.1f} min  {launcher:12} {strategy:20} {len(ended):3} fits, {len(bad)} ended badly", flush=True)
            for statuses, said in bad:
                print(f"    exit statuses {statuses}\n{said[-3000:]}", flush=True)
    print(f"{made} fits at a load of {asked.load}: {failures} ended badly.")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
