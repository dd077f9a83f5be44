"""The command that runs schedules says what it has run, also when it is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.schedules.__main__ import Tally

ROOT = Path(__file__).parents[2]


def test_what_has_run_is_told_by_protocol_with_the_seeds_that_broke_something() -> None:
    tally = Tally(first=40)
    for seed in range(40, 43):
        tally.note("membership", seed, None)
        tally.note("adpsgd", seed, "a model is lost" if seed == 41 else None)
    assert list(tally.lines()) == [
        "adpsgd: 3 schedules from seed 40, 1 broke an invariant: seeds [41].",
        "membership: 3 schedules from seed 40, none broke an invariant.",
    ]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_what_it_has_run(number: signal.Signals) -> None:
    code = (
        "import sys, tests.schedules.__main__ as command\n"
        "note = command.Tally.note\n"
        "def said(self, *args):\n"
        "    note(self, *args)\n"
        "    print('one', flush=True)\n"
        "command.Tally.note = said\n"
        "sys.exit(command.main())\n"
    )
    arguments = ["--protocols", "membership", "--first", "7", "--jobs", "1"]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "one\n"
            started.send_signal(number)
            said = started.communicate(timeout=60)[0]
        finally:
            started.kill()
    assert "schedules from seed 7, none broke an invariant." in said
    assert "Stopped before 100000 schedules were run" in said
    assert started.returncode == 1
