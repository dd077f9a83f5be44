"""The faults of docs/track-record.md: the tests that hold them exist, and the counts at its head are those of its tables."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_field_reports import names_in

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "track-record.md").read_text(encoding="utf-8")
KINDS = {"test", "schedule", "chaos", "review", "user report", "benchmark"}
MENDED = ["what happened", "since", "found by", "shown by", "mended"]
OPEN = ["what happens", "since", "found by", "where"]


class Fault(NamedTuple):
    """A line of a table.

    Attributes:
        since: a commit, or the beginning.
        found: by what, one of ``KINDS``.
        shown: a test, or a command; of one that is open, where.
        mended: a commit; None if the fault is open.
    """

    what: str
    since: str
    found: str
    shown: str
    mended: str | None


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table, row by row; the first one is the head's."""
    found: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def faults(page: str) -> list[Fault]:
    """What the tables of faults have."""
    found = []
    for head, _, *rows in tables(page):
        if head == MENDED:
            found += [Fault(*row) for row in rows]
        elif head == OPEN:
            found += [Fault(*row, None) for row in rows]
    return found


def wrong(fault: Fault) -> list[str]:
    """What cannot be of a line."""
    said = []
    if fault.found not in KINDS:
        said.append(f"found by {fault.found!r}")
    if fault.since != "the beginning" and not is_commit(fault.since):
        said.append(f"since {fault.since}")
    if fault.mended is None:
        files = re.findall(r"`((?:\w+/)+[\w.]*)`", fault.shown)
        return said + [f"no file {name}" for name in files if not (ROOT / name).exists()]
    if not is_commit(fault.mended):
        said.append(f"mended by {fault.mended}")
    return said + ([] if is_shown(fault.shown) else [f"shown by {fault.shown}"])


def is_commit(cell: str) -> bool:
    """Whether it looks like one: whether it is there is not asked, since a checkout may be shallow."""
    return re.fullmatch(r"`[0-9a-f]{7,40}`", cell) is not None


def is_shown(cell: str) -> bool:
    """Whether there is such a test, make target, module or, of a grep, such a line."""
    if test := re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell):
        path = ROOT / test[1]
        return path.exists() and test[2] in names_in(path)
    if target := re.fullmatch(r"`make ([\w-]+)`", cell):
        return re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) is not None
    if module := re.fullmatch(r"`python -m ([\w.]+)`", cell):
        place = ROOT.joinpath(*module[1].split("."))
        return place.with_suffix(".py").exists() or (place / "__main__.py").exists()
    if grep := re.fullmatch(r"`grep '?([^']+?)'? ([\w./]+)`", cell):
        return grep[1] in (ROOT / grep[2]).read_text(encoding="utf-8")
    return False


def test_each_line_names_what_is_there() -> None:
    bad = {fault.what: said for fault in faults(PAGE) if (said := wrong(fault))}
    assert not bad


def test_the_counts_at_the_head_are_those_of_the_tables() -> None:
    mended = Counter(fault.found for fault in faults(PAGE) if fault.mended is not None)
    still = Counter(fault.found for fault in faults(PAGE) if fault.mended is None)
    counts = {row[0]: (int(row[2]), int(row[3])) for row in tables(PAGE)[0][2:]}
    assert counts.pop("all") == (mended.total(), still.total())
    assert counts == {kind: (mended[kind], still[kind]) for kind in KINDS}


_HERE = "`tests/test_track_record.py::test_what_is_not_there_is_noticed`"
_LINE = Fault("a fault", "the beginning", "test", _HERE, "`1e4fee1`")


@pytest.mark.parametrize(
    "change",
    [
        {"since": "yesterday"},
        {"found": "luck"},
        {"shown": "`tests/test_track_record.py::test_that_nobody_wrote`"},
        {"shown": "`tests/test_nowhere.py::test_what_is_not_there_is_noticed`"},
        {"shown": "`make nothing`"},
        {"shown": "`python -m benchmarks.nothing`"},
        {"shown": "`grep 'torch<1' pyproject.toml`"},
        {"shown": "a look"},
        {"mended": "`1e4fee1-`"},
        {"mended": None, "shown": "`tests/nowhere.py`"},
    ],
)
def test_what_is_not_there_is_noticed(change: dict[str, str | None]) -> None:
    assert not wrong(_LINE)
    assert wrong(_LINE._replace(**change))  # type: ignore[arg-type]
