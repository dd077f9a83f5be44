"""The command: measure, print, write."""

from __future__ import annotations

import argparse

from benchmarks.common import console, write_results
from benchmarks.recovery import frozen, killed
from benchmarks.recovery.runs import STRATEGIES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description="Killed and frozen workers.")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="default: all")
    strategies = parser.parse_args().strategies
    results = {
        "killed": killed.measure(strategies),
        "frozen": frozen.measure([strategy for strategy in strategies if strategy != "torchft"]),
    }
    killed.show(results["killed"])
    frozen.show(results["frozen"])
    console.print(f"Written: {write_results('recovery', results)}")


if __name__ == "__main__":
    main()
