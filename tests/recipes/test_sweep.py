"""What happens to the jobs of a sweep, and what the loggers get of them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_gossip import ConfigurationError
from recipes import sweep
from recipes.processes import run_workers, started_from_outside
from recipes.tracking import name_of_sweep
from tests import warm
from tests.recipes.test_train import command
from tests.scripts import ROOT


def _fails(cfg: DictConfig) -> None:
    if os.environ["LOCAL_RANK"] == str(cfg.rank):
        if cfg.how == "raise":
            raise ConfigurationError("no such thing\n    not: this\nor: that")
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # for ever: somebody has to end it


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "reason"), [("raise", "ConfigurationError: no such thing not: this or: that"), ("kill", "signal SIGKILL")]
)
def test_a_worker_that_fails_or_is_killed_ends_its_job_and_is_named(
    how: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.processes._GRACE_S", 0.1)
    with pytest.raises((ProcessRaisedException, ProcessExitedException)) as caught:
        run_workers(_fails, OmegaConf.create({"rank": 1, "how": how}), 2)
    assert sweep.note_failure(caught.value, tmp_path).endswith(reason)
    assert sweep.reason_of(tmp_path).endswith(reason)


def _writes_its_rank(cfg: DictConfig) -> None:
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    text = json.dumps({name: os.environ[name] for name in names} | {"of": cfg.of})
    (Path(cfg.folder) / os.environ["LOCAL_RANK"]).write_text(text)


@pytest.mark.processes
def test_workers_find_their_rank_and_the_resolved_configuration(tmp_path: Path) -> None:
    run_workers(_writes_its_rank, OmegaConf.create({"folder": str(tmp_path), "seven": 7, "of": "${seven}"}), 2)
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [one.pop("LOCAL_RANK") for one in told] == ["0", "1"]
    assert told[0] == told[1]
    assert (told[0]["WORLD_SIZE"], told[0]["of"]) == ("2", 7)


def finished_sweep(folder: Path, capsys: pytest.CaptureFixture[str], *, failed: bool) -> str:
    for job in ("0", "1", "10"):
        (folder / job / ".hydra").mkdir(parents=True)
        (folder / job / ".hydra" / "overrides.yaml").write_text("[]")
        if not failed or job != "1":
            (folder / job / "summary.json").write_text("{}")
    (folder / "older" / ".hydra").mkdir(parents=True)  # of another sweep: it has no result either
    (folder / "older" / ".hydra" / "overrides.yaml").write_text("[]")
    os.utime(folder / "older" / ".hydra" / "overrides.yaml", (0, 0))
    end = pickle.loads(pickle.dumps(sweep.EndOfSweep()))  # as a launcher sends it to another machine
    end._began_s = time.time() - 60.0
    if failed:
        with pytest.raises(SystemExit, match="1"):
            end.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}}))
    else:
        end.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}}))
    return capsys.readouterr().out


def test_the_end_of_a_sweep_counts_its_jobs_and_says_what_to_run_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = finished_sweep(tmp_path, capsys, failed=False)
    assert f"3 of 3 jobs finished, in {tmp_path}" in said
    assert f"python -m recipes.report {tmp_path}" in said


def test_a_job_without_result_and_without_note_is_named_and_the_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = finished_sweep(tmp_path, capsys, failed=True)
    assert "2 of 3 jobs finished" in said
    assert "job 1 failed: it did not come to its end" in said


def test_a_job_that_begins_forgets_what_an_earlier_one_left_in_its_folder(tmp_path: Path) -> None:
    sweep.note_failure(ValueError("of\nbefore"), tmp_path)
    assert sweep.reason_of(tmp_path) == "ValueError: of before"
    for name in ("summary.json", "record.json", "metrics.csv"):
        (tmp_path / name).write_text("{}")
    sweep.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_jobs_of_a_sweep_are_named_after_its_folder() -> None:
    assert name_of_sweep("multirun/2026-11-28/07-23-29") == "2026-11-28/07-23-29"
    assert name_of_sweep("/data/sweeps/topologies") == "topologies"


@pytest.mark.parametrize(
    ("variables", "outside"),
    [({}, False), ({"LOCAL_RANK": "0"}, True), ({"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}, True)],
)
def test_workers_that_somebody_else_has_started_are_noticed(
    variables: dict[str, str], outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_from_outside() == outside


@pytest.mark.processes
def test_optunas_sweeper_maximizes_the_validation_accuracy_and_survives_a_failed_job(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    done = command(
        *("--multirun", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.direction=maximize"),
        *("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "recipe.data.batch_size=choice(8,2000)"),
        *("recipe=digits_mlp", "recipe.epochs=1", "logger=none", f"hydra.sweep.dir={tmp_path}"),
    )
    assert "1 of 2 jobs finished" in done.stdout, done.stderr
    best = OmegaConf.load(tmp_path / "optimization_results.yaml")
    assert best.best_params == {"recipe.data.batch_size": 8}
    assert best.best_value > 0.3


def _says_its_process(cfg: DictConfig) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a worker does that is inside a collective
    os.write(1, f"{os.getpid()}\n".encode())
    threading.Event().wait()


SWEEP = """
from omegaconf import OmegaConf
from recipes import processes
from tests.recipes.test_sweep import _says_its_process
processes._GRACE_S = 0.2
processes.run_workers(_says_its_process, OmegaConf.create(), 2)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_a_sweep_that_is_stopped_in_any_way_leaves_no_worker(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [warm.python(), "-c", SWEEP], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    workers = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    process.send_signal(number)
    assert process.wait(30.0) != 0
    _, left = psutil.wait_procs(workers, timeout=10.0)
    process.stdout.close()
    assert left == []
