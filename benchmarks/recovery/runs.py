"""Starting the workers of a run, and what they have written down."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness import recorded, wait, workers
from benchmarks.harness.workers import last_words, results
from benchmarks.recovery.work import WORKERS, Plan, train_with_lightning, train_with_torchft
from recipes.processes import reserved_port

DEADLINE_S = 300
_TORCHRUN = (
    *("torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"),
    *("--max-restarts=4", "--monitor-interval=0.1", "--no-python"),
)
_LIGHTHOUSE = ("--min_replicas", "1", "--join_timeout_ms", "10000", "--quorum_tick_ms", "100")
STRATEGIES = ["adpsgd", "ddp", *(["torchft"] if find_spec("torchft") else [])]


def run(strategy: str, plan: Plan) -> tuple[float, pd.DataFrame, dict[str, Any]]:
    """Train to the end.

    Returns:
        The test accuracy; the steps, one a row; and when what the plan says has happened: ``killed-3`` or ``frozen``.

    Raises:
        RuntimeError: if it failed or did not end in time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-recovery-")))
        task = train_with_torchft if strategy == "torchft" else train_with_lightning
        options: dict[str, Any] = {}
        if strategy == "ddp":
            options = {"launcher": _TORCHRUN, "environment": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
        elif strategy == "torchft":
            options = {"environment": {"TORCHFT_LIGHTHOUSE": stack.enter_context(_lighthouse())}}
        parameters = {"strategy": strategy, "plan": vars(plan)}
        started = stack.enter_context(workers(task, parameters, folder, hosts=(None,) * WORKERS, **options))
        if not wait(started, DEADLINE_S, killed=plan.kills if strategy != "ddp" else ()):
            raise RuntimeError(f"{strategy} did not end within {DEADLINE_S} s:\n{last_words(started)}")
        happened = {path.stem: float(path.read_text()) for path in folder.glob("*.happened")}
        return results(folder)[0], recorded(folder), happened


@contextmanager
def _lighthouse() -> Iterator[str]:
    """torchft's; its address."""
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", address, *_LIGHTHOUSE]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as lighthouse:
            try:
                yield f"http://{address}"
            finally:
                lighthouse.kill()
