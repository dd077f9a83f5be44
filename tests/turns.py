"""What pytest-xdist's workers run beside each other: `make test` has four, also on two cores, since many tests wait.

The tests of a file stay on one worker, so that what its fixtures make is made once. Those that start processes go to whoever is
free, where the file has no such fixture. Tests marked ``processes`` come first, so that the quick ones at the end keep all
workers busy. Beside a test marked ``alone`` the others do nothing: it measures seconds, and another test's work would be in
them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parents[1]


class ByFileOrTest(LoadFileScheduling):  # type: ignore[misc]
    """Which tests one worker gets together."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """What stays on one worker: the file of a test, or the test alone."""
    file = nodeid.split("::", 1)[0]
    return nodeid if _starts_processes(file) else file


@cache
def _starts_processes(file: str) -> bool:
    """Whether its tests do, and share nothing."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return "mark.processes" in text and 'scope="module"' not in text


class Turns:
    """A pytest plugin, one in each worker.

    A worker holds the lock of the floor while it runs a test: shared, or exclusive for one that is alone, and then until the
    last of those in a row. It asks for it while it holds the door's; else a test that is alone would wait until the others had
    none left. The kernel frees the locks of a worker that dies.

    Args:
        door: a file that is there; it is locked, not written.
        floor: another one.
    """

    def __init__(self, door: Path, floor: Path) -> None:
        self._door, self._floor = (os.open(path, os.O_RDONLY) for path in (door, floor))
        self._keeps_floor = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: (not _has(item, "alone"), not _has(item, "processes")))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout, which counts the seconds of the test
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        alone = _has(item, "alone")
        if not self._keeps_floor:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            self._keeps_floor = alone and nextitem is not None and _has(nextitem, "alone")
            if not self._keeps_floor:
                fcntl.flock(self._floor, fcntl.LOCK_UN)

    def pytest_unconfigure(self) -> None:
        os.close(self._door)
        os.close(self._floor)


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None
