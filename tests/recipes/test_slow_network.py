from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_gossip import ConfigurationError
from recipes.slow_network import limited
from tests.scripts import Ended, run

TRANSFER = """
import socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", 0))
def receive():
    connection, _ = listener.accept()
    while connection.recv(1 << 16):
        pass
    connection.sendall(b".")
receiver = threading.Thread(target=receive)
receiver.start()
sender = socket.create_connection(listener.getsockname())
started_s = time.monotonic()
sender.sendall(bytes(2_500_000))
sender.shutdown(socket.SHUT_WR)
assert sender.recv(1) == b"."
print(time.monotonic() - started_s)
receiver.join()
sys.exit(7)
"""


def slowly(rate: str, *command: str) -> Ended:
    return run("-m", "recipes.slow_network", rate, *command)


@pytest.fixture(scope="module")
def done() -> Ended:
    """A transfer over a slow loopback."""
    try:
        limited("20mbit", ["true"])
    except ConfigurationError as error:
        pytest.skip(str(error))
    return slowly("20mbit", sys.executable, "-c", TRANSFER)


@pytest.mark.processes
def test_the_loopback_of_the_command_has_the_rate_and_that_of_the_machine_has_not(
    done: Ended,
) -> None:
    assert done.stdout, done.stderr
    assert 0.7 < float(done.stdout) < 10  # 20 Mbit at 20 Mbit/s, less what the bucket lets pass at once
    assert "tbf" not in subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True).stdout


@pytest.mark.processes
def test_the_exit_status_is_the_commands(done: Ended) -> None:
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("rate", ["fast", "100", "0mbit", "-1mbit", "1mbit; true"])
def test_what_is_no_rate_is_refused_with_an_example(rate: str) -> None:
    with pytest.raises(ConfigurationError, match="100mbit"):
        limited(rate, ["true"])


@pytest.mark.processes
def test_a_missing_command_gets_one_clear_sentence() -> None:
    done = slowly("1gbit")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ConfigurationError: There is no command to run")


def test_a_machine_without_the_tools_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match=r"unshare, ip, tc not found.*iproute2"):
        limited("1gbit", ["true"])
