"""Situations of public issue threads: what a Lightning script does that works under DDP.

`make test` runs each under one strategy, every second one under AD-PSGD; `make test-slow` under all others.

The cases are scripts in ``cases/`` (``python tests/field/cases/05_save_every_n_steps.py adpsgd``). Here their workers are
forked from a server that has imported torch once, so that one costs a second or two; those that are about the start or the end
of the processes themselves run as scripts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.scripts import run
from tests.strategies.launch import outcomes

pytestmark = pytest.mark.processes

CASES = Path(__file__).with_name("cases")
STRATEGIES = ("adpsgd", "dpsgd", "apsgd", "periodic_averaging", "qsgd")
AS_SCRIPTS = {"23_ctrl_c", "24_notebook"}
MAY_REFUSE = {"20_simclr_all_gather"}  # with a reason, before it trains
MINUTES = {"15_rank_zero_evaluates_alone"}
NAMES = sorted(path.stem for path in CASES.glob("[0-9]*.py"))


def pairs() -> list[object]:
    """Each case with each strategy."""
    found = []
    for number, name in enumerate(name for name in NAMES if name not in AS_SCRIPTS | MINUTES):
        quick = "adpsgd" if number % 2 == 0 else STRATEGIES[1 + number // 2 % (len(STRATEGIES) - 1)]
        for strategy in STRATEGIES:
            marks = [] if strategy == quick else [pytest.mark.slow]
            found.append(pytest.param(name, strategy, marks=marks, id=f"{name}-{strategy}"))
    return found


def load(name: str) -> ModuleType:
    """The module of a case."""
    if str(CASES) not in sys.path:
        sys.path.insert(0, str(CASES))  # cases import _field, as scripts find it
    spec = importlib.util.spec_from_file_location(f"field_case_{name}", CASES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what it defines can be pickled
    spec.loader.exec_module(module)
    return module


def work(name: str, strategy: str, place: str) -> None:
    """One rank of a case; what it returns is in a file, as with scripts."""
    os.environ["FIELD_DIR"] = place
    os.chdir(place)
    torch.save(load(name).worker(strategy), result_of(Path(place), int(os.environ["LOCAL_RANK"])))


def result_of(place: Path, rank: int) -> Path:
    return place / f"rank{rank}.pt"


@pytest.mark.parametrize(("name", "strategy"), pairs())
def test_what_works_under_ddp_works(name: str, strategy: str, tmp_path: Path) -> None:
    began_s = time.monotonic()
    ended = outcomes(work, name, strategy, str(tmp_path))
    failures = [result for ok, result in ended if not ok]
    if name in MAY_REFUSE and any("ConfigurationError" in failure for failure in failures):
        return  # a rank that hears of it before it has refused itself ends with a PeerError
    assert not failures, "\n".join(failures)
    case = load(name)
    ranks = [torch.load(result_of(tmp_path, rank), weights_only=False) for rank in range(len(ended))]
    case.judge(ranks, sys.modules["_field"].Run(strategy, 0, time.monotonic() - began_s, ""))


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name == "adpsgd" else pytest.mark.slow) for name in STRATEGIES]
)
@pytest.mark.parametrize("name", sorted(AS_SCRIPTS))
def test_what_works_under_ddp_works_as_a_script(name: str, strategy: str) -> None:
    run_script(name, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", sorted(MINUTES))
def test_what_takes_minutes_works(name: str, strategy: str) -> None:
    run_script(name, strategy)


def run_script(name: str, strategy: str) -> None:
    """A case as a user would start it."""
    ended = run(str(CASES / f"{name}.py"), strategy)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
