"""The hosts, links and processes themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.cluster import Host, Network, Process, network, remains
from lightning_gossip import ConfigurationError

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("hosts")]

_ECHO = Path(__file__).with_name("echo.py")


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(2, rate_mbit=1000) as made:
        yield made


def _talk(net: Network, megabytes: float = 0.001, timeout_s: float = 0.5) -> float:
    """Seconds that a message takes from host 0 to host 1 and an answer back; inf if none comes."""
    server, client = net.hosts
    with subprocess.Popen([*server.prefix, sys.executable, "-S", str(_ECHO), "serve"], stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        serving.stdout.readline()
        command = [
            *client.prefix,
            sys.executable,
            "-S",
            str(_ECHO),
            server.address,
            str(round(megabytes * 1e6)),
            str(timeout_s),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        for pid in server.namespaces.processes():
            with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
                os.kill(pid, signal.SIGKILL)
    return float(done.stdout) if done.returncode == 0 else float("inf")


def test_a_link_carries_its_rate_and_another_one_when_that_is_set(net: Network) -> None:
    assert 0.03 < _talk(net, 5, 10) < 1.0  # 40 Mb of payload at 1 Gb/s
    net.set_rate(net.hosts[0], 50)
    assert 0.7 < _talk(net, 5, 10) < 3.0  # 0.8 s, without the first burst
    net.set_rate(net.hosts[0], 1000)


def test_a_switch_that_is_too_small_loses_what_is_large_also_when_the_kernel_hands_over_much_at_once() -> None:
    with network(2, rate_mbit=1000) as net:  # whose buckets let 16 kB pass in one piece
        net.set_mtu(net.hosts[1], 1280, at_switch=True)
        assert _talk(net, 0.001) < float("inf")
        assert _talk(net, 0.016) == float("inf")


@pytest.mark.parametrize("trouble", ["cut", "part"])
def test_nothing_passes_a_link_that_is_cut_until_it_is_healed(net: Network, trouble: str) -> None:
    assert _talk(net) < 0.5
    if trouble == "cut":
        net.cut(net.hosts[1])
    else:
        net.part([net.hosts[1]])
    assert _talk(net) == float("inf")
    net.heal(net.hosts[1])
    assert _talk(net, timeout_s=5.0) < 5.0


def _process(host: Host, code: str, folder: Path) -> Process:
    process = Process(host, "timeit", ("-n1", "-r1", code), environment={"SAID": "hello"}, log=folder / "log")
    process.start()
    return process


def test_a_process_runs_in_its_host_says_what_it_was_given_and_ends(net: Network, tmp_path: Path) -> None:
    process = _process(net.hosts[0], "import os; print(os.environ['SAID'], os.getpid() < 1000, os.listdir('/proc'))", tmp_path)
    assert process.wait(20) == 0
    assert process.await_line("hello (True)", 5)
    assert str(os.getpid()) not in process.lines[0].split("[")[1]
    assert (tmp_path / "log").read_text().startswith("hello")
    process.close()


def test_a_process_can_be_frozen_thawed_and_killed(net: Network, tmp_path: Path) -> None:
    # each beat is a message to it and one back, by signals; frozen it does not answer
    code = "import signal; signal.pthread_sigmask(0, {10})\nwhile True: print('ready'); signal.sigwait({10}); print('beat')"
    process = _process(net.hosts[0], code, tmp_path)
    process.await_line("ready", 20)
    process.stop()
    process.signal(signal.SIGUSR1)
    with pytest.raises(TimeoutError, match="did not say 'beat' within"):
        process.await_line("beat", 0.2)
    process.go_on()
    process.await_line("beat", 10)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    with pytest.raises(TimeoutError, match="before it ended"):
        process.await_line("something else", 10)
    process.close()


def _make_one(said: Connection) -> None:
    with network(1, rate_mbit=10) as net:
        said.send(net.hosts[0].namespaces.name)
        signal.pause()


def test_nothing_is_left_of_a_network_even_if_its_maker_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    heard, said = context.Pipe(duplex=False)
    maker = context.Process(target=_make_one, args=(said,))
    maker.start()
    name = heard.recv()
    assert remains(name)
    maker.kill()
    maker.join()
    deadline_s = time.monotonic() + 10
    while remains(name):  # the kernel tells nobody
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize(("number", "rate_mbit"), [(0, 10.0), (1000, 10.0), (1, 0.0)])
def test_a_network_that_cannot_be_is_refused(number: int, rate_mbit: float) -> None:
    with pytest.raises(ConfigurationError), network(number, rate_mbit=rate_mbit):
        pass
