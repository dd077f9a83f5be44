"""Starting the workers of a run, and ending every one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from benchmarks.recovery.work import WORKERS, Plan
from recipes.processes import reserved_port

DEADLINE_S = 300
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_LAUNCHERS = {
    "adpsgd": [sys.executable],
    "ddp": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"),
        *("--max-restarts=4", "--monitor-interval=0.1", "--no-python", sys.executable),
    ],
}
_LIGHTHOUSE = ("--min_replicas", "1", "--join_timeout_ms", "10000", "--quorum_tick_ms", "100")
STRATEGIES = [*_LAUNCHERS, *(["torchft"] if find_spec("torchft") else [])]


@contextmanager
def run(strategy: str, plan: Plan) -> Iterator[Path]:
    """The folder with what the workers of a run have written down, once it has ended.

    Raises:
        RuntimeError: if it failed or did not end in time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-recovery-")))
        log = stack.enter_context(open(folder / "log", "w"))
        stack.callback(_kill_workers, folder)
        began_s = time.monotonic()
        processes = [
            subprocess.Popen(
                [*launcher, "-m", "benchmarks.recovery.worker", strategy, str(folder), plan.to_json()],
                env={**os.environ, **_ENVIRONMENT, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for launcher, environment in _starts(strategy, stack, log)
        ]
        killed = [-signal.SIGKILL] * len(plan.kills) if strategy == "torchft" else []
        try:
            codes = sorted(process.wait(max(0.0, began_s + DEADLINE_S - time.monotonic())) for process in processes)
            ended = None if codes == killed + [0] * (len(codes) - len(killed)) else f"ended with {codes}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {DEADLINE_S} s"
        if ended is not None or not (folder / "result").exists():
            _kill_workers(folder)
            raise RuntimeError(f"{strategy} {ended or 'has no result'}:\n{(folder / 'log').read_text()[-3000:]}")
        yield folder


def _starts(strategy: str, stack: ExitStack, log: IO[str]) -> list[tuple[list[str], dict[str, str]]]:
    """A command and its environment for each process to start; what they need beside them lives until the stack is left."""
    if strategy != "torchft":
        return [(_LAUNCHERS[strategy], {})]
    address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
    command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", address, *_LIGHTHOUSE]
    lighthouse = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
    stack.callback(lighthouse.kill)
    environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
    return [([sys.executable], {**environment, "LOCAL_RANK": str(rank)}) for rank in range(WORKERS)]


def _kill_workers(folder: Path) -> None:
    """Those of launchers too, which are in sessions of their own: each has the folder's name among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if str(folder).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
