"""The built wheel and sdist, in clean environments with the lowest and the highest versions that the package claims.

    python -m tests.compat [--versions lowest highest] [--keep FOLDER]

Takes minutes and gigabytes: each environment gets a torch of its own. ``make compat`` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

import tomllib
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("lowest", "highest")
_INSTALL_S, _RUN_S = 1800, 300
console = Console()

FABRIC = """
import torch, lightning_gossip
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="adpsgd")
    fabric.launch()
    x = torch.randn(256, 8)
    net = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for (points,) in fabric.setup_dataloaders(DataLoader(TensorDataset(x), batch_size=8)):
        fabric.backward(model(points).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if fabric.is_global_zero:
        print("trained", sum(worker.steps for worker in fabric.strategy.report.workers))
"""
SIMULATION = """
from lightning_gossip.analysis import constant, fastest
from lightning_gossip.simulation import ADPSGD, Cluster, Constant, Steps, simulate
print("simulated", simulate(ADPSGD(), Cluster(workers=4, compute=Constant(0.1)), work=Steps(number=20)).time_s)
print("analysed", fastest(constant(8.0)).damping)
"""


class Outcome(NamedTuple):
    """Of one environment."""

    versions: str
    source: str
    installed: str
    what: str
    seconds: float
    problem: str


def lowest() -> list[str]:
    """Each dependency of the package at the least version that it claims."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = []
    for text in project["dependencies"]:
        requirement = Requirement(text)
        floor = next(specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
        pinned.append(f"{requirement.name}=={floor}")
    return pinned


def built(folder: Path) -> dict[str, Path]:
    """The wheel and the sdist."""
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)], ROOT, _RUN_S)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def examine(versions: str, source: str, package: Path, folder: Path) -> list[Outcome]:
    """Install a package in a new environment, and train, simulate and analyse there."""
    console.print(f"{versions} versions, {source}: installing, some minutes")
    began_s = time.monotonic()
    venv.create(folder / "environment", with_pip=True)
    python = str(folder / "environment" / "bin" / "python")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(lowest() if versions == "lowest" else []) + "\n")
    problem = _problem([python, "-m", "pip", "install", "--quiet", "-c", str(constraints), str(package)], folder, _INSTALL_S)
    problem = problem or _problem([python, "-m", "pip", "check"], folder, _RUN_S)
    installed = "" if problem else _versions(python, folder)
    outcomes = [Outcome(versions, source, installed, "pip install, pip check", time.monotonic() - began_s, problem)]
    script = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert script is not None
    scripts = {"the README's script": script[1], "Fabric": FABRIC, "simulation, analysis": SIMULATION}
    for what, text in scripts.items() if not problem else ():
        (folder / "script.py").write_text(text)
        began_s = time.monotonic()
        failed = _problem([python, "script.py"], folder, _RUN_S)
        outcomes.append(Outcome(versions, source, installed, what, time.monotonic() - began_s, failed))
    return outcomes


def _versions(python: str, folder: Path) -> str:
    code = "from importlib.metadata import version\nfor name in 'torch', 'lightning', 'numpy': print(name, version(name))"
    return ", ".join(_run([python, "-c", code], folder, _RUN_S).split("\n")).strip(", ")


def _run(command: list[str], folder: Path, timeout_s: float) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip())
    return done.stdout


def _problem(command: list[str], folder: Path, timeout_s: float) -> str:
    try:
        _run(command, folder, timeout_s)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error)[-2000:]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description="The package in clean environments.")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=list(VERSIONS), help="default: both")
    parser.add_argument("--keep", type=Path, help="a folder for the environments; default: one that is deleted")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compat-")))
        packages = built(folder / "built")
        for versions in arguments.versions:
            source = "wheel" if versions == "lowest" else "sdist"  # both are installed once
            place = folder / f"{versions}-{source}"
            place.mkdir(parents=True, exist_ok=True)
            outcomes += examine(versions, source, packages[source], place)
    table = Table(title="The package in clean environments", title_justify="left")
    for column in ("versions", "from", "installed", "what", "seconds", "outcome"):
        table.add_column(column)
    for outcome in outcomes:
        said = outcome.problem.splitlines()[-1][:200] if outcome.problem else "works"
        table.add_row(outcome.versions, outcome.source, outcome.installed, outcome.what, f"{outcome.seconds:.0f}", said)
    console.print(table)
    if problems := [outcome for outcome in outcomes if outcome.problem]:
        for outcome in problems:
            console.print(f"\n{outcome.versions}, {outcome.source}: {outcome.what}\n{outcome.problem}", markup=False)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
