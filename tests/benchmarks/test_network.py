"""benchmarks/network: its arithmetic, its file, its tables, and one small run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks.cluster import unavailable
from benchmarks.network import __main__ as command
from benchmarks.network.contenders import CONTENDERS
from benchmarks.network.measures import ideal_rates, pace
from benchmarks.network.report import plot, show
from benchmarks.network.results import Results
from benchmarks.network.runner import Run
from benchmarks.network.scenarios import SCENARIOS, Condition
from benchmarks.network.summary import median_and_spread, summarize, time_to, value_at
from benchmarks.network.workload import BATCH_SIZE, COMPUTE_S, WORKS, loss_of
from tests.scripts import run

CALM = Condition("1 Gb/s", 1000)


def _curve(loss: list[float], step_s: float, steps: int = 40) -> dict[str, list[float]]:
    at = [number * steps / (len(loss) - 1) for number in range(len(loss))]
    return {"s": [steps * step_s for steps in at], "steps": at, "loss": loss, "accuracy": [1 - value / 3 for value in loss]}


def _run(contender: str, loss: list[float], step_s: float, **other: Any) -> dict[str, Any]:
    share = 0.1 / step_s
    return {
        "scenario": "rates",
        "work": "mlp",
        "condition": "1 Gb/s",
        "undisturbed": "1 Gb/s",
        "rate_mbit": 1000,
        "contender": contender,
        "seed": 0,
        "steps": 40,
        "seconds": 60.0,
        "stopped": False,
        "samples_per_s": [320 * share] * 4,
        "share": share,
        "bytes_per_step": 26e6,
        "cpu_s_per_step": 0.03,
        "exchanges_per_step": None,
        "curve": _curve(loss, step_s),
        **other,
    }


def test_a_loss_is_reached_between_the_two_points_around_it() -> None:
    curve = {"s": [0.0, 1.0, 2.0, 3.0], "loss": [4.0, 2.0, 3.0, 1.0]}
    assert time_to(3.0, curve) == pytest.approx(0.5)  # the first time, though it is lost again
    assert time_to(1.5, curve) == pytest.approx(2.75)
    assert time_to(5.0, curve) == 0.0
    assert time_to(0.5, curve) is None


def test_a_curve_has_values_between_its_points_and_none_outside() -> None:
    assert value_at([0, 10, 20], [1.0, 3.0, 2.0], 15) == pytest.approx(2.5)
    assert value_at([0, 10, 20], [1.0, 3.0, 2.0], 21) is None


def test_the_spread_leaves_out_what_is_not_known() -> None:
    assert median_and_spread([3.0, None, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median_and_spread([None]) is None


def test_speed_up_is_ddps_time_to_its_loss_over_the_contenders() -> None:
    falling = [2.0, 1.0, 0.6, 0.4, 0.2]
    runs = [_run("ddp", falling, 0.4), _run("adpsgd", falling, 0.1), _run("no_exchanges", [2.0, 1.9, 1.8, 1.7, 1.6], 0.1)]
    ddp, gossip, alone = summarize(runs)
    assert ddp["to_loss"]["90%"]["seconds"][0] == pytest.approx(36 * 0.4)
    assert gossip["to_loss"]["90%"]["speed_up"][0] == pytest.approx(4.0)
    assert alone["to_loss"]["90%"] == {"seconds": None, "speed_up": None, "reached": 0, "compared": 1}
    assert gossip["over_yardstick"] == pytest.approx(1.0)


def test_a_run_that_was_stopped_gives_no_loss_to_reach() -> None:
    short = _run("ddp", [2.0, 1.5], 4.0, stopped=True)
    short["curve"]["steps"] = [0, 10]
    (row,) = summarize([short])
    assert (row["to_loss"]["90%"]["compared"], row["accuracy"], row["stopped"]) == (0, None, 1)


def test_pace_counts_between_the_last_warm_up_and_the_first_end() -> None:
    lines = [(rank, 0.2 * n, BATCH_SIZE, 1000 * n, 0.05 * n) for rank in range(4) for n in range(1, 13)]
    lockstep = pd.DataFrame(lines, columns=["rank", "at_s", "samples", "sent", "cpu_s"])
    found = pace(lockstep, ideal_rates(4, 1.0))
    assert found["share"] == pytest.approx(COMPUTE_S / 0.2)
    assert found["bytes_per_step"] == pytest.approx(1000)
    assert found["cpu_s_per_step"] == pytest.approx(0.05)
    assert pace(lockstep.groupby("rank").head(1), ideal_rates(4, 1.0))["share"] is None


def test_a_slow_worker_is_ideal_at_its_own_pace() -> None:
    assert sum(ideal_rates(4, 4.0)) == pytest.approx(3.25 * BATCH_SIZE / COMPUTE_S)


def test_every_scenario_plans_all_contenders_under_all_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["network", "--scenario", *SCENARIOS, "--seeds", "2"])
    arguments = command.options()
    for scenario in SCENARIOS:
        plan = command.planned(arguments, scenario)
        conditions = {run.condition.label for run, _ in plan}
        assert len(plan) == 2 * len(CONTENDERS) * len(conditions)
        assert {undisturbed for _, undisturbed in plan} <= conditions
        assert len({run.key for run, _ in plan}) == len(plan)


@pytest.mark.parametrize(("name", "its_s"), [("conv", 102.2e6 * 8e-9 / 0.25), ("char_gpt", 4 * 124_439_808 * 8e-9 / 1.8)])
def test_scaled_links_are_to_a_work_what_the_nominal_ones_are_to_the_model_that_it_stands_for(name: str, its_s: float) -> None:
    work = WORKS[name]
    for compute_s in (COMPUTE_S, 0.3):
        ours_s = work.nbytes * 8e-9 / work.link_scale(compute_s)  # to send the model at nominal 1 Gb/s
        assert ours_s / compute_s == pytest.approx(its_s)


@pytest.mark.parametrize("name", WORKS)
def test_every_work_learns_from_its_own_data(name: str) -> None:
    work = WORKS[name]
    torch.manual_seed(0)
    net, (train, test) = work.build(), work.data()
    optimizer = work.optimizer(net, list(net.parameters()), 0.3 * work.lr)
    batch = [torch.stack(tensors) for tensors in zip(*(train[index] for index in range(work.batch_size)), strict=True)]
    before = float(loss_of(net, test))
    for _ in range(8):
        optimizer.zero_grad()
        loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss_of(net, test)) < before
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(net.parameters()))


def test_results_are_kept_run_by_run_and_only_under_the_same_settings(tmp_path: Path) -> None:
    path, run = tmp_path / "results" / "network.json", Run("rates", "mlp", CALM, "ddp", 0, 40, 4)
    measured = {key: value for key, value in _run("ddp", [2.0, 0.5], 0.3).items() if key not in ("seconds", "undisturbed")}
    Results(path, {"workers": 4}).add(run, CALM.label, measured, 12.3)
    again = Results(path, {"workers": 4})
    again.load()
    assert again.has(run)
    assert not again.has(Run("rates", "mlp", CALM, "ddp", 1, 40, 4))
    assert json.loads(path.read_text())["summary"][0]["contender"] == "ddp"
    others = Results(path, {"workers": 8})
    others.load()
    assert not others.runs


def test_the_report_names_the_contenders_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for seed, condition in ((0, "undisturbed"), (0, "one link 20 Mb/s"), (1, "undisturbed"), (1, "one link 20 Mb/s")):
        where = {"scenario": "slow_link", "condition": condition, "undisturbed": "undisturbed", "seed": seed}
        runs += [_run("ddp", [2.0, 1.0, 0.5], 0.4 + 0.1 * seed, **where), _run("adpsgd", [2.0, 1.0, 0.5, 0.4], 0.1, **where)]
    summary = show(runs)
    text = capsys.readouterr().out
    assert "AD-PSGD" in text
    assert "[0.20," in text
    gossip = next(row for row in summary if row["contender"] == "adpsgd" and row["condition"] != "undisturbed")
    assert math.isclose(gossip["others_over_undisturbed"], 1.0)
    plot(runs, "slow_link", tmp_path / "network.png")
    assert (tmp_path / "network.png").stat().st_size > 10_000


def test_without_root_the_command_ends_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: "hosts as network namespaces need root on Linux")
    monkeypatch.setattr(sys, "argv", ["network"])
    with pytest.raises(SystemExit, match=r"^This machine cannot have a cluster: .* need root on Linux\.$"):
        command.main()


@pytest.mark.slow
@pytest.mark.processes
def test_a_small_run_leaves_results_and_goes_on_where_it_was(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    arguments = [
        "--workers",
        "2",
        "--steps",
        "8",
        "--seeds",
        "1",
        "--rates",
        "1000",
        "--output",
        str(tmp_path / "network.json"),
    ]

    def measured(*more: str) -> str:
        ended = run("-m", "benchmarks.network", *arguments, "--contenders", *more)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    measured("ddp")
    assert "1 of 2 runs are there already" in measured("ddp", "adpsgd", "--resume")
    kept = json.loads((tmp_path / "network.json").read_text())
    assert [run["contender"] for run in kept["runs"]] == ["ddp", "adpsgd"]
    assert all(0 < run["share"] < 1.1 for run in kept["runs"])
    assert (tmp_path / "network.png").exists()
