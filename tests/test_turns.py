from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.turns import unit_of

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = """
from pathlib import Path
from tests.turns import Turns

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: nothing beside it")
    config.addinivalue_line("markers", "processes: first")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(Path(__file__), Path(__file__).with_name("test_a.py")))
"""
# the tests that meet wait for each other, so they end only if they run at once
TESTS = """
import json, time
from pathlib import Path
import pytest

HERE = Path(__file__)

@pytest.fixture(autouse=True)
def _note(request):
    began_s = time.monotonic()
    yield
    with (HERE.parent / f"{HERE.stem}.notes").open("a") as file:
        print(json.dumps([request.node.name, began_s, time.monotonic()]), file=file)

def test_meets_the_other():
    HERE.with_suffix(".here").touch()
    deadline_s = time.monotonic() + 30
    while len(list(HERE.parent.glob("*.here"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)

@pytest.mark.processes
@pytest.mark.parametrize("number", range(5))
def test_has_neighbours(number):
    time.sleep(0.01)

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_is_alone(number):
    time.sleep(0.03)
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, float, float]]]:
    """By file: test, begin and end, in the order in which they ran."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "conftest.py").write_text(CONFTEST)
    for name in "ab":
        (folder / f"test_{name}.py").write_text(TESTS)
    options = ["-q", "-p", "xdist.plugin", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-c", "/dev/null"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    line = [sys.executable, "-m", "pytest", *options, "--rootdir", ".", "."]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert "18 passed" in done.stdout, done.stdout + done.stderr
    return [[json.loads(line) for line in (folder / f"test_{name}.notes").read_text().splitlines()] for name in "ab"]


def test_nothing_runs_beside_a_test_that_is_alone(notes: list[list[tuple[str, float, float]]]) -> None:
    for mine, others in (notes, notes[::-1]):
        for name, began_s, ended_s in mine:
            if name.startswith("test_is_alone"):
                assert all(end_s <= began_s or begin_s >= ended_s for _, begin_s, end_s in others)


def test_those_that_are_alone_come_first_and_then_those_with_processes(notes: list[list[tuple[str, float, float]]]) -> None:
    for mine in notes:
        assert [name.split("[")[0] for name, *_ in mine] == [
            *["test_is_alone"] * 3,
            *["test_has_neighbours"] * 5,
            "test_meets_the_other",
        ]


def test_what_one_worker_gets_together() -> None:
    shared = "tests/strategies/test_conformance.py"
    assert unit_of(f"{shared}::test_a") == unit_of(f"{shared}::test_b")
    quick = "tests/algorithm/adpsgd/test_pace.py"
    assert unit_of(f"{quick}::test_a") == unit_of(f"{quick}::test_b")
    cases = "tests/field/test_cases.py"
    assert unit_of(f"{cases}::test_a[1]") != unit_of(f"{cases}::test_a[2]")
