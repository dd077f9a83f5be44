"""A store that outlives every worker: ``python -m lightning_gossip.store --port 29400``; see docs/survival.md.

Workers reach it with ``ADPSGDStrategy(store="tcp://<host>:29400")``. One store a run: a new run needs a new one.
"""

from __future__ import annotations

import argparse
import signal

from torch._C._distributed_c10d import TCPStore

from lightning_gossip.runtime.open_files import raise_limit


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="The store of one run, apart from its workers.")
    parser.add_argument("--port", type=int, default=29400, help="0 for a free one")
    port = parser.parse_args().port
    raise_limit()  # a socket for each connection of each worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before the store's threads inherit it
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"store: listening on port {store.port}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
