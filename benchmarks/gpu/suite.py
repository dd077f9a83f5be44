"""The tests marked ``gpu``, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness import ROOT

TIMEOUT_S = 120.0


def measure(left_s: float) -> dict[str, Any]:
    """Run them.

    Args:
        left_s: seconds that it may take.

    Returns:
        Names of those that passed and failed, and of those that were skipped with the reason.

    Raises:
        RuntimeError: if pytest itself failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder:
        report = Path(folder) / "report.xml"
        files = [str(path) for path in marked()]
        line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=min(TIMEOUT_S, left_s), check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        return told(report)


def marked() -> list[Path]:
    """The files that have such tests: to collect all others takes longer than these."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]


def told(report: Path) -> dict[str, Any]:
    """What a report of pytest's says."""
    found: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        failures = [*case.findall("failure"), *case.findall("error")]
        if failures:
            found["failed"][name] = (failures[0].get("message") or "")[:300]
        elif skipped is not None:
            found["skipped"][name] = skipped.get("message") or ""
        else:
            found["passed"].append(name)
    return found
