"""The files of examples/ train as they stand."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.scripts import Ended, run

EXAMPLES = Path(__file__).parents[1] / "examples"
SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
command[0] = sys.executable
slurm = {{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "gossip", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
         "SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"}}
tasks = [subprocess.Popen(command, env=dict(os.environ, **slurm, SLURM_PROCID=str(i), SLURM_NODEID=str(i))) for i in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""


def _trained(ended: Ended) -> None:
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    assert float(re.search(r"accuracy (\d\.\d+)", ended.output)[1]) > 0.9  # type: ignore[index]
    assert re.findall(r"rank (\d): [1-9]\d* steps, [1-9]\d* exchanges", ended.output) == ["0", "1"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["script.py"], id="script"),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "torchrun.py"],
            id="torchrun",
            marks=pytest.mark.slow,
        ),
        pytest.param(["cli.py", "fit", "--config", "cli.yaml"], id="cli", marks=pytest.mark.slow),
        pytest.param(["hydra_app/train.py", "topology=exponential"], id="hydra", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains(command: list[str]) -> None:
    _trained(run(*command, folder=EXAMPLES))


@pytest.mark.processes
def test_the_cells_of_the_notebook_train(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    _trained(run(str(script), folder=EXAMPLES, PYTHONPATH=f"{EXAMPLES}:{EXAMPLES.parent}"))


@pytest.mark.slow
@pytest.mark.processes
def test_the_batch_file_of_slurm_trains(tmp_path: Path) -> None:
    """SLURM is played by an srun that starts two tasks with its variables."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    script = tmp_path / "sbatch.py"
    script.write_text(f"import subprocess, sys\nsys.exit(subprocess.call(['bash', '{EXAMPLES / 'slurm.sh'}']))\n")
    _trained(run(str(script), folder=EXAMPLES, PATH=f"{tmp_path}:{os.environ['PATH']}"))


def test_the_table_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")} - {"slurm.py"}
    assert [name for name in files if f"({name})" not in text] == []
