from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm

pytestmark = pytest.mark.processes

# what a script may ask of its process
SCRIPT = """
import json, os, sys
told = {"argv": sys.argv[1:], "name": __name__, "spec": __spec__ and __spec__.name, "path": sys.path[0], "folder": os.getcwd()}
told |= {"variable": os.environ.get("VARIABLE"), "in": sys.stdin.read(), "leads": os.getsid(0) == os.getpid()}
print(json.dumps(told))
sys.exit(int(sys.argv[1]))
"""


def told(python: str, arguments: list[str], folder: Path) -> tuple[int, Any, str]:
    environment = {**os.environ, "VARIABLE": "seven", "PYTHONPATH": str(folder)}
    line = [python, *arguments, "3", "four"]
    done = subprocess.run(
        line, cwd=folder, env=environment, input="a line", capture_output=True, text=True, check=False, start_new_session=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["file", "module", "text"])
def test_a_script_finds_what_it_finds_in_a_python_of_its_own(how: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(SCRIPT)
    (tmp_path / "module_of_test_warm.py").write_text(SCRIPT)
    arguments = {"file": ["folder/script.py"], "module": ["-m", "module_of_test_warm"], "text": ["-c", SCRIPT]}[how]
    assert told(warm.python(), arguments, tmp_path) == told(sys.executable, arguments, tmp_path)


def test_an_exception_is_told_and_the_status_is_1() -> None:
    done = subprocess.run([warm.python(), "-c", "1 / 0"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


WAITS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print("waits", flush=True)
while True:
    time.sleep(0.05)  # not pause(): a signal just before that would be waited for
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGUSR1, 5), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_to_the_command_is_one_to_the_script(number: signal.Signals, status: int) -> None:
    command = [warm.python(), "-c", WAITS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=interruptible
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(20) == status


def interruptible() -> None:
    """A shell lets what it starts in the background ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("whom", ["command", "script"])
def test_neither_of_the_two_outlives_the_other(whom: str) -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with subprocess.Popen([warm.python(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        script = psutil.Process(int(process.stdout.readline()))
        assert script.pid in warm.sessions_of(os.getsid(process.pid))
        (process if whom == "command" else script).send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        psutil.wait_procs([script], timeout=20)
        assert not script.is_running()


def test_what_a_script_starts_is_forked_too_and_is_of_its_sessions() -> None:
    inner = "import sys, time; t = sys.modules.get('torch'); print(t is not None, flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    command = [warm.python(), "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "True\n"
        assert len(warm.sessions_of(process.pid)) == 3
        process.stdin.close()
        assert process.wait(20) == 0


def test_multiprocessing_starts_its_fork_server_by_it() -> None:
    code = """
import multiprocessing, sys
multiprocessing.get_context("forkserver").Process(target=print, args=("hello",)).start()
"""
    done = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
