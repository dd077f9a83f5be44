"""See the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import overhead, page, recovery, suite, trace, training
from benchmarks.gpu.machine import Setting, describe
from benchmarks.harness import ROOT, console, write_results
from recipes.commands import cleaning_up_on_sigterm

BUDGET_S = 460.0  # of eight minutes, with the start
LEAST_S = 30.0  # else a stage is not begun


class Stages:
    """Runs one stage after the other; what one has found, and why another was left out or has failed.

    Attributes:
        found: by stage.
        left_out: stage: why it was not run.
        failed: stage: the error that has ended it.
        seconds: by stage.
    """

    def __init__(self, budget_s: float) -> None:
        self.found: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._until_s = time.monotonic() + budget_s

    def run(self, name: str, measure: Callable[[float], Any], *, unless: str | None = None) -> None:
        """Run one.

        Args:
            name: of the stage.
            measure: returns what JSON has; is told how many seconds are left.
            unless: why it cannot run here; None if it can.
        """
        left_s = self._until_s - time.monotonic()
        if unless is None and left_s < LEAST_S:
            unless = f"{max(0.0, left_s):.0f} s of the time were left."
        if unless is not None:
            self.left_out[name] = unless
            console.print(f"{name}: left out. {unless}")
            return
        console.print(f"{name} …")
        began_s = time.monotonic()
        try:
            self.found[name] = measure(left_s)
        except Exception as error:  # noqa: BLE001 - told in the results; the other stages do not depend on it
            self.failed[name] = f"{type(error).__name__}: {error}"
            console.print(f"{name}: failed.", style="bold")
            traceback.print_exc()
        self.seconds[name] = time.monotonic() - began_s

    def step_s(self) -> float | None:
        """Of a step in bfloat16 with two workers at it, as the overhead has shown."""
        rows = self.found.get("overhead", [])
        return next((row["plain"]["step_s"] for row in rows if row["precision"] == "bf16-mixed"), None)


def revision() -> str:
    """Of the code that is measured."""
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def measure(setting: Setting, output: Path) -> tuple[dict[str, Any], Stages]:
    """All stages."""
    stages = Stages(BUDGET_S)
    without = None if setting.cuda else "There is no CUDA device, and these tests need one."
    stages.run("suite", suite.measure, unless=without)
    stages.run("overhead", lambda left_s: overhead.measure(setting, left_s))
    stages.run("trace", lambda left_s: trace.measure(setting, output, left_s))
    for strategy in training.STRATEGIES:
        stages.run(strategy, lambda left_s, name=strategy: training.measure(name, setting, stages.step_s(), left_s))  # type: ignore[misc]
    stages.run("recovery", lambda left_s: recovery.measure(setting, left_s))
    trained = {strategy: stages.found.pop(strategy) for strategy in training.STRATEGIES if strategy in stages.found}
    limits = []
    if not setting.cuda:
        limits.append("No CUDA device: the device is emulated on the CPU, and nothing here is a measurement of a GPU.")
    if setting.shares_a_device:
        limits.append("One device for several workers, who talk over Gloo: NCCL and its failures were not tried.")
    results = {
        "setting": setting.told(),
        "revision": revision(),
        "device": describe(setting),
        "limits": limits,
        "left_out": stages.left_out,
        "failed": stages.failed,
        "seconds": {name: round(seconds, 1) for name, seconds in stages.seconds.items()},
        **stages.found,
        "training": trained,
    }
    return results, stages


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What this machine's GPUs do with this package."
    )
    parser.add_argument("--quick", action="store_true", help="as few steps as make sense: does it run?")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "gpu", help="folder of gpu.json, gpu.html, the trace")
    told = parser.parse_args(arguments)
    output: Path = told.output
    output.mkdir(parents=True, exist_ok=True)
    setting = Setting.found(quick=told.quick)
    with cleaning_up_on_sigterm():
        results, stages = measure(setting, output)
    path = write_results("gpu", results, output)
    page.write(path, output / "gpu.html")
    page.show(results)
    console.print(f"Written: {path} and {output / 'gpu.html'}. Attach gpu.json to an issue.")
    return int(bool(stages.failed) or bool(stages.found.get("suite", {}).get("failed")))


if __name__ == "__main__":
    sys.exit(main())
