"""Jobs as a user's command starts them. Under Lightning's own launcher once with processes that import all anew, under torchrun
and the others in `make test-slow`; else their processes are forked (tests/warm).
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recipes.processes import reserved_port
from tests.scripts import Ended, finish, run, start
from tests.strategies.jobs import store
from tests.strategies.models import Net, loader, trainer

pytestmark = pytest.mark.processes
SCRIPT, FITS = "tests/strategies/script.py", "tests/strategies/fits.py"
END_S = 50.0  # from the trouble to the end of the job; before it, importing alone has taken a minute on a busy machine


def in_time(ended: Ended) -> Ended:
    """The end of a job in which a rank has struck came soon."""
    struck = re.search(r"strikes at ([\d.]+)", ended.output)
    assert struck, ended.output
    assert time.monotonic() - float(struck[1]) < END_S
    return ended


def check(folder: Path, workers: int) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert [w["rank"] for w in result["workers"]] == list(range(workers))
    assert sum(w["samples"] for w in result["workers"]) == 2 * 400
    assert all(w["exchanges"] > 0 for w in result["workers"])
    assert result["accuracy"] > 0.7


FRESH, FORKED = sys.executable, None


@pytest.mark.parametrize(
    ("strategy", "python"),
    [
        pytest.param("adpsgd", FRESH, id="adpsgd"),
        pytest.param("adpsgd_spawn", FORKED, id="adpsgd_spawn"),
        pytest.param("adpsgd_spawn", FRESH, id="adpsgd_spawn-fresh", marks=pytest.mark.slow),
        pytest.param("adpsgd_fork", FRESH, id="adpsgd_fork", marks=pytest.mark.slow),
    ],
)
def test_the_same_script_runs_under_every_start_method(strategy: str, python: str | None, tmp_path: Path) -> None:
    ended = finish(start(SCRIPT, str(tmp_path), strategy, python=python))
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    check(tmp_path, 2)
    if strategy == "adpsgd":
        check_nothing_is_left_at_the_end(tmp_path, 2, ended.output)


def check_nothing_is_left_at_the_end(folder: Path, workers: int, output: str) -> None:
    """A thread of Gloo that outlives the interpreter may abort the process."""
    for rank in range(workers):
        told = folder / f"left-{rank}.json"
        assert told.exists(), output
        assert json.loads(told.read_text()) == {"group": False, "gloo": []}


@pytest.mark.parametrize("python", [FORKED, pytest.param(FRESH, marks=pytest.mark.slow)], ids=["forked", "fresh"])
def test_the_same_script_runs_under_torchrun(python: str | None, tmp_path: Path) -> None:
    with reserved_port() as port:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        ended = finish(start(*launcher, SCRIPT, str(tmp_path), "adpsgd", python=python))
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    check(tmp_path, 2)
    check_nothing_is_left_at_the_end(tmp_path, 2, ended.output)


@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("popen", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_one_store_serves_all_that_one_process_does_one_after_the_other(start_method: str, tmp_path: Path) -> None:
    with store() as address:
        ended = run(FITS, str(tmp_path), start_method, "2", address)
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    result = json.loads((tmp_path / "result.json").read_text())
    assert [sum(samples) for samples in result["samples"]] == [400, 400]
    assert all(min(samples) > 0 for samples in result["samples"])
    assert result["accuracy"] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_many_fits_in_one_process_end_without_a_word(start_method: str, tmp_path: Path) -> None:
    count = 50 if start_method == "fork" else 5  # popen starts each worker of each fit anew
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns of addresses without a name
    ended = run(FITS, str(tmp_path), start_method, str(count), timeout_s=400.0, **quiet)
    assert (ended.returncode, ended.output, ended.left) == (0, "", [])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [sum(samples) for samples in result["samples"]] == [400] * count


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [("adpsgd", "raise"), pytest.param("adpsgd", "raise0", marks=pytest.mark.slow), ("adpsgd_fork", "raise")],
)
def test_one_rank_that_raises_ends_the_job_with_its_traceback_and_no_orphan(strategy: str, mode: str, tmp_path: Path) -> None:
    ended = in_time(run(SCRIPT, str(tmp_path), strategy, mode, "3"))
    assert ended.returncode != 0
    assert f"ArithmeticError: rank {'0' if mode == 'raise0' else '1'} breaks in step 3" in ended.output
    assert ended.left == []
    if strategy == "adpsgd":  # the others say who tells why; those that are forked tell their starter, who prints one
        assert ended.output.count("Traceback") == 1, ended.output


@pytest.mark.parametrize("strategy", [pytest.param("adpsgd", marks=pytest.mark.slow), "adpsgd_fork"])
def test_sigterm_to_one_rank_ends_the_job_and_the_checkpoint_loads(strategy: str, tmp_path: Path) -> None:
    ended = in_time(run(SCRIPT, str(tmp_path), strategy, "sigterm", "3"))
    assert not (tmp_path / "result.json").exists(), ended.output
    assert ended.left == []
    assert "Traceback" not in ended.output
    model = Net()
    t = trainer(strategy="auto", devices=1, max_epochs=2)
    t.fit(model, loader(400, 4), ckpt_path=str(tmp_path / "stopped.ckpt"))
    assert t.current_epoch == 2
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=True)["lightning_gossip"]["world_size"] == 3


def test_two_jobs_and_two_trainers_at_once_do_not_meet(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    jobs = []
    with contextlib.ExitStack() as ports:
        for folder in folders:
            folder.mkdir()
            port = ports.enter_context(reserved_port())
            jobs.append(start(SCRIPT, str(folder), "adpsgd_fork", MASTER_PORT=str(port)))
        results = [finish(job) for job in jobs]
    for folder, ended in zip(folders, results, strict=True):
        assert ended.returncode == 0, ended.output
        check(folder, 2)


@pytest.mark.slow
def test_a_name_used_without_the_import_is_lightnings_own_error() -> None:
    command = "from lightning.pytorch import Trainer; Trainer(strategy='adpsgd', accelerator='cpu', devices=2)"
    ended = finish(start("-c", command, python=FRESH))
    assert ended.returncode != 0
    assert "You selected an invalid strategy name: `strategy='adpsgd'`" in ended.output


def _is_whole(folder: Path, left: list[int]) -> None:
    """Those that were left have ended both epochs, and taken every sample that the killed one had not finished."""
    result = json.loads((folder / "result.json").read_text())
    assert [worker["rank"] for worker in result["workers"]] == left
    finished = int(
        (folder / "steps-before-the-kill").read_text()
    )  # perhaps of both epochs; of the last one it told nobody, perhaps
    assert 2 * 400 - finished * 4 <= sum(worker["samples"] for worker in result["workers"]) <= 2 * 400


@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("adpsgd_fork", marks=pytest.mark.slow)])
def test_the_launcher_lets_the_others_go_on_when_a_worker_is_killed(strategy: str, tmp_path: Path) -> None:
    ended = run(SCRIPT, str(tmp_path), strategy, "kill", "3")
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    assert "rank 1 has failed; 2 workers go on" in ended.output
    _is_whole(tmp_path, [0, 2])


@pytest.mark.slow
def test_with_a_torchrun_agent_for_each_worker_the_others_go_on(tmp_path: Path) -> None:
    def agent(rank: int) -> subprocess.Popen[str]:
        where = ["--nnodes=3", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        return start("-m", "torch.distributed.run", *where, SCRIPT, str(tmp_path), "adpsgd", "kill", "1", "3")

    with reserved_port() as port, ThreadPoolExecutor(3) as threads:
        agents = [agent(rank) for rank in range(3)]
        ends = [threads.submit(finish, process) for process in agents]  # reads what they say: torch says much
        try:
            assert ends[1].result(90).returncode != 0
            deadline_s = time.monotonic() + 60
            while not (tmp_path / "result.json").exists() and time.monotonic() < deadline_s:
                time.sleep(0.1)  # nobody tells a file's coming
            _is_whole(tmp_path, [0, 2])
        finally:
            for process in agents:  # those that are left wait for five minutes for the one that has gone
                process.send_signal(signal.SIGTERM)
        outputs = [end.result().output for end in ends]
    assert all("rank 1 has failed; 2 workers go on" in outputs[rank] for rank in (0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_the_host_of_the_first_torchrun_agent_is_survived_with_a_static_rendezvous(rendezvous: str, tmp_path: Path) -> None:
    def agent(rank: int) -> subprocess.Popen[str]:
        where = {
            "static": [f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"],
            "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(rank == 0)}"],
        }[rendezvous]
        options = ["--nnodes=2", "--nproc-per-node=1", *where, SCRIPT, str(tmp_path), "adpsgd", "node", "1", "2"]
        return start("-m", "torch.distributed.run", *options, python=FRESH)

    with reserved_port() as port, ThreadPoolExecutor(2) as threads:
        first, second = threads.map(finish, [agent(rank) for rank in range(2)])
    assert first.returncode == -signal.SIGKILL
    assert second.left == []
    if rendezvous == "static":  # the agent asks for nothing, and at its end finds no store to wait at
        assert second.returncode == 0, second.output
        assert "rank 0 has failed; 1 workers go on" in second.output
        _is_whole(tmp_path, [1])
    else:  # the agent ends its workers
        assert second.returncode != 0
        assert "RendezvousConnectionError" in second.output
        assert not (tmp_path / "result.json").exists()
