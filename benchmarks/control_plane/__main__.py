"""``python -m benchmarks.control_plane``."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster import Process
from benchmarks.control_plane.phases import measure
from benchmarks.control_plane.report import plot, show, summarize
from benchmarks.harness import RESULTS, ROOT, console, run, write_results

PROCESSES = 4  # that have the workers
_TIMEOUT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description="What membership, heartbeats and claims cost.")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1024], help="numbers of workers, at least 4")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a shorter epoch, one death")
    parser.add_argument("--output", type=Path, help="folder; default: benchmarks/results, outputs/benchmarks with --quick")
    options = parser.parse_args()
    folder = options.output or (ROOT / "outputs" / "benchmarks" if options.quick else RESULTS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the store has two connections of each worker
    # torch asks for the name of the other end of each connection: where no name server answers that takes seconds
    os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1 use-vc", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    found: list[dict[str, Any]] = []
    for workers in options.workers:
        with console.status(f"{workers} workers"):
            found.append(measured(workers, quick=options.quick))
        path = write_results("control_plane", {"processes": PROCESSES, "runs": found}, folder)
    show(found)
    plot(found, path.with_suffix(".png"))
    console.print(f"Written: {path} and a picture beside it")


def measured(workers: int, *, quick: bool) -> dict[str, Any]:
    """One number of workers, with a new store."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        store = Process(None, "lightning_gossip.store", ("--port", "0"), environment={}, log=Path(folder) / "log")
        store.start()
        try:
            port = int(store.await_line(r"port (\d+)", 120.0)[1])
            how = {"rounds": 3 if quick else 9, "epoch_s": 1.0 if quick else 10.0, "deaths": 1 if quick else 2}
            parameters = {"port": port, "store_pid": store.pid, "workers": workers, **how}
            each = run(measure, parameters, hosts=(None,) * min(PROCESSES, workers // 2), timeout_s=_TIMEOUT_S)
        finally:
            store.close()
    return summarize(workers, each)


if __name__ == "__main__":
    main()
