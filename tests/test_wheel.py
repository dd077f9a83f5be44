"""The built wheel, in an environment that has nothing of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

APP = """
import json, sys
import hydra, lightning_gossip
from hydra.utils import instantiate
from importlib.util import find_spec

@hydra.main(version_base="1.3", config_path=".", config_name="mine")
def main(cfg):
    strategy = instantiate(cfg.strategy)
    found = [name for name in ("conf", "recipes", "tests", "benchmarks") if find_spec(name) is not None]
    print(json.dumps({"package": lightning_gossip.__file__, "strategy": type(strategy).__name__, "topology": strategy.topology,
                      "exchanges": strategy.exchanges_per_step, "found": found}))

main()
"""
CONFIG = """
defaults:
  - topology: star
  - strategy: adpsgd
  - _self_
strategy: {exchanges_per_step: 0.5}
hydra:
  searchpath: ['pkg://lightning_gossip.conf']
  run: {dir: .}
  output_subdir: null
"""


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel")
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, folder=folder)
    (built,) = folder.glob("lightning_gossip-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment with the wheel. What it depends on is this environment's; an editable install is not."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    executable = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)  # as pip does; `make compat` has pip do it
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # no .pth file in there is read
    return executable


def test_the_wheel_has_the_package_its_configurations_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = next(name.split("/")[0] for name in names if name.endswith("/METADATA"))
    assert {name.split("/")[0] for name in names} == {"lightning_gossip", info}
    in_tree = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_gossip").rglob("*") if path.suffix in (".py", ".yaml")
    }
    assert {name for name in names if name.endswith((".py", ".yaml"))} == in_tree
    assert "lightning_gossip/py.typed" in names


@pytest.mark.processes
def test_a_users_own_app_composes_a_strategy_from_the_installed_package(python: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    told: dict[str, Any] = json.loads(run(python, "app.py", "topology=ring", folder=tmp_path).splitlines()[-1])
    assert Path(told.pop("package")).is_relative_to(python.parents[1])
    assert told == {"strategy": "ADPSGDStrategy", "topology": "ring", "exchanges": 0.5, "found": []}
