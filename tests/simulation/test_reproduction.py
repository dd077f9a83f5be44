"""The headlines at a size of seconds, and the page that reports them."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib import import_module

import pytest
import torch

from benchmarks.reproduction import __main__ as reproduction
from benchmarks.reproduction import (
    adaptive,
    budget,
    convergence,
    docs,
    eamsgd,
    network,
    pairing,
    poisson,
    rate,
    shared_network,
    slow_link,
    slow_worker,
    speed_up,
    staleness,
)
from benchmarks.reproduction.report import FOLDER
from lightning_gossip.simulation import ADPSGD, DPSGD, AllReduce, Constant, Erlang, Quadratic, digits, mlp

# -- one slow worker, one slow link ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [2.0, 10.0])
def test_an_epoch_of_gossip_is_near_the_ideal_and_one_of_all_reduce_is_as_slow_as_the_worker(slowdown: float) -> None:
    def ratio(name: str) -> float:
        times_s = [slow_worker.epoch_s(slow_worker.STRATEGIES[name], s, workers=8, steps=100) for s in (slowdown, 1.0)]
        return times_s[0] / times_s[1]

    assert ratio("AD-PSGD") == pytest.approx(slow_worker.ideal(8, slowdown), abs=0.02)
    assert ratio("all-reduce (DDP)") > 0.9 * slowdown
    assert ratio("D-PSGD") > 0.9 * slowdown


def test_an_epoch_shorter_than_a_step_of_the_slow_worker_waits_for_its_one_sure_batch() -> None:
    assert slow_worker.epoch_s(ADPSGD(), 100.0, workers=8, steps=25, law=Constant(1.0)) == pytest.approx(100.0)


def test_a_slow_link_costs_gossip_the_epoch_s_end_and_all_reduce_every_step() -> None:
    growth = {
        name: slow_link.epoch_s(strategy, 10.0, workers=8) - slow_link.epoch_s(strategy, 1.0, workers=8)
        for name, strategy in slow_link.TIMED.items()
    }
    one_exchange_s, all_reduce_s = slow_link.ends_cost_s(10.0, workers=8)
    assert growth["AD-PSGD"] <= one_exchange_s + all_reduce_s
    assert growth["all-reduce"] == pytest.approx(slow_link.STEPS * 0.9 * all_reduce_s, rel=0.01)


def test_only_a_very_slow_link_lets_its_ends_drift() -> None:
    ends, others = zip(*(slow_link.drift(ADPSGD(), factor, workers=8, epochs=8) for factor in (1.0, 100.0)), strict=True)
    assert ends[0] == pytest.approx(others[0], rel=0.3)
    assert ends[1] > 2.0 * ends[0]
    assert ends[1] > 1.3 * others[1]


# -- the shared network ------------------------------------------------------------------------------------------------------


def compared(kind: str, gbits: float, workers: int = 32) -> tuple[float, float]:
    """All-reduce's epoch over gossip's, and gossip's exchanges a step."""
    net, batches = shared_network.links(kind, gbits, workers=workers), 40 * workers
    gossip = shared_network.epoch(ADPSGD(topology="exponential"), net, workers=workers, batches=batches)
    all_reduce = shared_network.epoch(AllReduce(overlap=False), net, workers=workers, batches=batches)
    return all_reduce.epoch_s / gossip.epoch_s, gossip.exchanges


def test_the_bounds_of_the_ratio_are_those_that_the_page_tells() -> None:
    assert shared_network.cap(overlap=False) == pytest.approx(2.98, abs=0.005)
    assert shared_network.cap(overlap=True) == pytest.approx(2.32, abs=0.005)


@pytest.mark.parametrize("kind", ["uniform", "bottleneck"])
def test_without_chance_a_ratio_above_four_comes_with_less_than_one_exchange_a_step(kind: str) -> None:
    ratio, exchanges = compared(kind, 2.0)
    assert ratio > 4.0
    assert exchanges < 0.5
    ratio, exchanges = compared(kind, 12.0)
    assert ratio < shared_network.cap(overlap=False, workers=32)
    assert exchanges > shared_network.ENOUGH


def test_where_an_exchange_takes_a_step_random_pairs_make_fewer_than_one_a_step_and_a_bottleneck_one() -> None:
    step_gbits = shared_network.MODEL_BYTES / shared_network.COMPUTE_S / shared_network.GBIT
    assert compared("uniform", step_gbits)[1] < 0.8
    assert compared("bottleneck", step_gbits)[1] > 0.95


def test_symmetric_roles_starve_where_a_request_takes_a_step_and_bipartite_ones_do_not() -> None:
    assert pairing.where_a_request_takes(0.1, "symmetric", workers=32) > 0.9
    bipartite, symmetric = (pairing.where_a_request_takes(1.0, roles, workers=32) for roles in pairing.ROLES)
    assert symmetric < 0.35
    assert bipartite > 0.55


def test_links_that_are_slow_at_random_raise_the_ratio_more_than_they_cost_exchanges() -> None:
    even, slow = compared("uniform", 15.0, workers=128), compared("random", 15.0, workers=128)
    assert slow[0] > 1.7 * even[0]
    assert slow[1] > 0.8


# -- learning ------------------------------------------------------------------------------------------------------------------


def test_eight_workers_reach_the_loss_about_eight_times_sooner() -> None:
    problem = speed_up.PROBLEMS["quadratic"]
    alone, together = (speed_up.times(problem, workers, seeds=(0,))["AD-PSGD"] for workers in (1, 8))
    assert alone / together == pytest.approx(8.0, rel=0.1)


def test_a_loss_that_is_not_reached_takes_forever() -> None:
    problem = speed_up.PROBLEMS["quadratic"]._replace(at_most=80)
    assert speed_up.times(problem, 8, seeds=(0,))["AD-PSGD"] == float("inf")


@pytest.mark.parametrize(
    ("topology", "workers", "gap"), [("ring", 8, 3.661e-2), ("ring", 128, 9.410e-6), ("exponential", 16, 6.25e-2)]
)
def test_the_gaps_are_those_of_the_papers(topology: str, workers: int, gap: float) -> None:
    assert convergence.gap(topology, workers) == pytest.approx(gap, rel=1e-3)


def test_after_the_same_samples_gossip_has_all_reduce_s_loss() -> None:
    objective = mlp(digits())
    gossip, all_reduce = (
        convergence.train(objective, strategy, 8, seed=0, total=4_000) for strategy in (ADPSGD(), AllReduce(overlap=False))
    )
    assert gossip.loss == pytest.approx(all_reduce.loss, rel=0.15)
    assert gossip.accuracy > 0.9


def test_at_a_high_learning_rate_the_adaptive_period_beats_the_constant_one_with_fewer_averagings() -> None:
    objective, setting = mlp(digits()), adaptive.SETTINGS[0]
    constant, adapted = (
        adaptive.train(objective, adaptive.STRATEGIES[name], setting, seed=0) for name in (adaptive.CONSTANT, "adaptive")
    )
    assert adapted.loss is not None
    assert constant.loss is not None
    assert adapted.loss < 0.5 * constant.loss
    assert adapted.averagings is not None
    assert constant.averagings is not None
    assert adapted.averagings < constant.averagings


@pytest.mark.parametrize("speed", [1.14, 1.95])
def test_the_calibrated_ratio_gives_the_speed_up_back(speed: float) -> None:
    ratio = adaptive.communication_over_compute(speed)
    assert adaptive.simulated_speed_up(ratio, workers=4, steps=160) == pytest.approx(speed, rel=0.02)


def test_staleness_has_the_mean_and_spread_of_theory() -> None:
    values = staleness.staleness(Erlang(1.0, 4), rounds=1_500)
    assert values.mean() == pytest.approx(15.0, rel=0.01)
    assert values.std() == pytest.approx(7.9, rel=0.05)


# -- the command and the page ------------------------------------------------------------------------------------------------


# -- early and late averaging, elastic averaging, the rate, a network, arrivals ----------------------------------------------


def test_early_averaging_is_ahead_where_a_high_learning_rate_falls() -> None:
    objective, setting = mlp(digits()), budget.Setting(4, 8, 0.2, budget.FALLING)
    runs = {name: budget.train(objective, period, setting, seed=0, steps=240) for name, period in budget.PERIODS.items()}
    early, constant, late = (run.loss or math.inf for run in runs.values())
    assert early < constant < late
    assert {run.averagings for run in runs.values()} == {30}
    assert budget.drift(runs["late: 16, then 4"]) > 2.0 * budget.drift(runs["early: 4, then 16"])


def test_elastic_averaging_is_behind_periodic_averaging_on_as_many_bytes() -> None:
    objective = mlp(digits())
    elastic, periodic = (
        eamsgd.train(objective, eamsgd.STRATEGIES[name], 4, 8, 4, 0.05, 0) for name in ("EAMSGD, 8", "periodic averaging, 8")
    )
    assert elastic.loss > 1.1 * periodic.loss
    assert elastic.nbytes < 1.1 * periodic.nbytes
    assert eamsgd.best({0.1: [elastic], 0.2: [periodic]}) == 0.2


@pytest.mark.parametrize("name", ["all-reduce", "AD-PSGD"])
def test_four_times_the_updates_halve_the_mean_squared_gradient(name: str) -> None:
    problem = rate.Problem(Quadratic(rate.SPECTRUM, noise=rate.NOISE), 1.0, 20.0)
    counts = [400, 1_600]
    values = [rate.mean_square(problem, rate.STRATEGIES[name], 4, updates, seed=0) for updates in counts]
    assert rate.slope(counts, values) == pytest.approx(-0.5, abs=0.15)
    assert rate.slope([1, 4, 16], [8.0, 4.0, 2.0]) == pytest.approx(-0.5)


def test_the_hessian_of_the_network_is_that_of_its_loss() -> None:
    objective = network.Classifier(digits(), hidden=2, dtype=torch.float64)
    at = objective.start(torch.Generator().manual_seed(0))
    found, direction = network.hessian(objective, at), torch.randn(len(at), generator=torch.Generator().manual_seed(1)).double()
    direction /= direction.norm()
    ends = network.gradients(objective, torch.stack([at + 1e-8 * direction, at - 1e-8 * direction]))  # no kink in between
    along = float(direction @ (ends[0] - ends[1])) / 2e-8
    assert float(direction @ found @ direction) == pytest.approx(along, abs=1e-6)
    assert float(torch.linalg.eigvalsh(found).max()) > 10.0 * abs(along)


def test_arrivals_are_poisson_s_in_short_windows_and_each_worker_s_own_in_long_ones() -> None:
    for name in ("exponential", "Erlang-4"):
        law, squared = poisson.LAWS[name]
        times = poisson.arrivals(law, 16, steps=2_000)
        assert poisson.dispersion(times, 0.03) == pytest.approx(1.0, abs=0.06)
        assert poisson.dispersion(times, 10.0) == pytest.approx(squared, abs=0.2)
        assert poisson.distance(times, 16.0) < 0.03
    assert poisson.distance(poisson.arrivals(Constant(1.0), 4, steps=500), 4.0) > 0.1


@pytest.mark.parametrize("name", reproduction.HEADLINES)
def test_every_headline_has_a_module_its_results_and_all_its_tables_on_the_page(name: str) -> None:
    assert callable(import_module(f"benchmarks.reproduction.{name}").show)
    results = json.loads((FOLDER / f"{name}.json").read_text())
    shown = [number for of, number in docs.tables_in(docs.PAGE.read_text()) if of == name]
    assert sorted(shown) == list(range(len(results["tables"])))


def test_the_page_s_tables_are_those_that_the_command_printed() -> None:
    page = docs.PAGE.read_text()
    assert docs.with_tables(page) == page, "run python -m benchmarks.reproduction.docs, and read the prose again"
    changed = re.sub(r"\| 1\.0(\d\d) \|", r"| 9.9\1 |", page, count=1)
    assert changed != page
    assert docs.with_tables(changed) == page


def test_an_unknown_headline_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduction", "slow_wroker"])
    with pytest.raises(SystemExit):
        reproduction.main()
    assert "slow_wroker" in capsys.readouterr().err


def test_a_ring_of_neighbours_costs_as_much_as_an_all_reduce_where_the_network_is_slow() -> None:
    net = shared_network.links("uniform", 1.0, workers=16)
    times_s = [shared_network.epoch(s, net, workers=16, batches=320).epoch_s for s in (DPSGD(), AllReduce(overlap=False))]
    assert times_s[0] == pytest.approx(times_s[1], rel=0.15)
