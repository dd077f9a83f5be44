"""The command: measure, print, write."""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.harness import RESULTS, console, write_results
from benchmarks.recovery import frozen, killed
from benchmarks.recovery.runs import STRATEGIES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description="Killed and frozen workers.")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="default: all")
    parser.add_argument("--holder", action="store_true", help="only: the worker killed that holds the store, under AD-PSGD")
    options = parser.parse_args()
    strategies = [] if options.holder else options.strategies
    results: dict[str, dict[str, Any]] = {"killed": {}, "frozen": {}}
    if set(strategies) != set(STRATEGIES) and (file := RESULTS / "recovery.json").exists():  # the others' stay
        results = {name: found for name, found in json.loads(file.read_text()).items() if name in results}
    for strategy in strategies:
        results["killed"][strategy] = killed.measure(strategy)
        if strategy != "torchft":  # not tried: it is to be killed
            results["frozen"][strategy] = frozen.measure(strategy)
        path = write_results("recovery", results)
    if "adpsgd" in results["killed"] and (options.holder or "adpsgd" in strategies):
        results["killed"]["adpsgd"][killed.HOLDER_KILLED] = killed.measure_holder()
        path = write_results("recovery", results)
    killed.show(results["killed"])
    frozen.show(results["frozen"])
    console.print(f"Written: {path}")


if __name__ == "__main__":
    main()
