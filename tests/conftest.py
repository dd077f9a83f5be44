"""The police: whatever a test leaves behind fails it. And seeds, which are printed by hypothesis on failure."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# a shell that starts the tests in the background lets them ignore Ctrl-C, and so all that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: several tests at once have no core to spare, nor their processes

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import warm
from tests.turns import ByFileOrTest, Turns

settings.register_profile(
    "gossip", deadline=None, print_blob=True, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gossip")

# torch's store asks for the name of every address that it connects with; where the name server is silent that takes 5 s
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_GRACE_S = 5.0  # for what is already ending when the test returns

# What libraries set once, on first use, for the whole process.
_LIBRARY_VARIABLES = {
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTEST_CURRENT_TEST",
}


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # in a worker of pytest-xdist, which is forked too
        sys.executable = config.workerinput["python"]
        multiprocessing.set_executable(sys.executable)
        config.pluginmanager.register(Turns(Path(__file__), Path(__file__).with_name("turns.py")))
    elif config.getoption("numprocesses", None) and not config.option.collectonly:
        warm.share()
        config.option.tx = [f"popen//python={warm.python()}"] * len(config.option.tx)  # one import of everything serves all


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["python"] = sys.executable


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what stays is not looked at again by each collection, of which the tests make thousands
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # else pytest gives each of sixty a handler, and takes it away, three times a test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFileOrTest:
    return ByFileOrTest(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    warm.close()


@pytest.fixture(autouse=True)
def _warm_python(request: pytest.FixtureRequest) -> None:
    """What multiprocessing starts is forked from it too, its fork server first of all."""
    if request.node.get_closest_marker("processes"):
        multiprocessing.set_executable(warm.python())


@pytest.fixture(autouse=True)
def _seeds() -> None:
    import numpy as np  # not above: where pytest-xdist's workers run the tests, this process needs neither
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack thrice for devices that are not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _suspects(before)) and time.monotonic() < deadline:
        left[0].join(0.1)
    assert not left, f"threads left behind: {[thread.name for thread in left]}"


def _suspects(before: set[threading.Thread]) -> list[threading.Thread]:
    """New threads that would keep the process alive, and ours whatever they are."""
    new = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    return [thread for thread in new if not thread.daemon or thread.name.startswith("gossip-")]


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    import torch.distributed as dist

    assert not (dist.is_available() and dist.is_initialized())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a process group was left initialised")


@pytest.fixture(autouse=True)
def _no_environment_variable_changed() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name) and name not in _LIBRARY_VARIABLES
    }
    if changed:
        os.environ.clear()
        os.environ.update(before)
        pytest.fail(f"environment variables changed: {sorted(changed)}")


@pytest.fixture(autouse=True)
def _no_child_process_left() -> Iterator[None]:
    before = _descendants()
    yield
    new = [process for process in map(_process, _descendants() - before) if process is not None and not _is_helper(process)]
    if new:
        _, left = psutil.wait_procs(new, timeout=_GRACE_S)
        names = [f"{child.pid} {child.name()}" for child in left]
        for child in left:
            child.kill()
        assert not left, f"child processes left behind: {names}"


def _descendants() -> set[int]:
    """Processes below this one, as the kernel lists them; too many tests ask for looking at all processes each time."""
    found: set[int] = set()
    parents = [os.getpid(), *filter(None, [warm.server()])]
    while parents:
        with contextlib.suppress(OSError):  # it has ended
            for path in Path(f"/proc/{parents.pop()}/task").iterdir():
                children = [int(pid) for pid in (path / "children").read_text().split()]
                found.update(children)
                parents += children
    return found


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_helper(process: psutil.Process) -> bool:
    """Python's own and ours, which live as long as the interpreter."""
    try:
        if warm.is_helper(process):
            return True
        if process.ppid() != os.getpid():
            return False
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return "resource_tracker" in command or "forkserver" in command
