"""Is what a plan recommends the best of what it has looked at, and does it reach the target?

Twelve clusters, from 2 to 64 workers, from 1 kB/s to 100 Gb/s, with and without a worker that is ten times slower; four more,
on which an earlier planner was first run when its constants had been chosen; and twelve that a seed has drawn, on which this
one was. For each the planner measures curvature and noise on the recipe (digits, one hidden layer), and chooses among all
strategies with the present number of workers. Then every candidate is simulated with real gradients, with the learning rate
that the plan has for it and with the recipe's own, until the mean model's loss is at the plan's target; so is DDP with the
recipe's, for comparison.

    python -m benchmarks.planning [--quick] [--situations NUMBER ...]
    python -m benchmarks.planning --curvature          # what becomes of noise and curvature as the loss falls
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from benchmarks.harness import RESULTS, print_table, write_results
from lightning_gossip.simulation import SGD, AllReduce, Recording, Strategy, simulate
from recipes.job import be_quiet
from recipes.planning import curvature, known
from recipes.planning.choice import Candidate, Planner, soonest
from recipes.planning.refinement import refined
from recipes.simulate import compose_strategies
from recipes.simulated.scenario import Scenario, scenario_of
from recipes.train import CONF

AIM = 1.2
TARGET = 0.1  # of the loss where curvature and noise are measured
SEEDS = (0, 1)
STRATEGIES = ("ddp", "adpsgd", "apsgd", "periodic_averaging", "dpsgd", "qsgd")
_STEPS = 1_500  # of a worker, at most
_EPOCHS = (1, 2, 5, 10, 20, 40)  # after which noise and curvature are measured
_LOOKED_AT = 16  # workers' own models
_LATE = 1.5  # times the best so far: a candidate that takes longer is given up


class Situation(NamedTuple):
    """A cluster that is planned for."""

    workers: int
    bandwidth: float  # bytes a second of each port
    slowdown: float = 1.0  # of one worker

    @property
    def spoken(self) -> str:
        bits = 8.0 * self.bandwidth
        unit, name = next((unit, name) for unit, name in ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s")) if bits >= unit)
        return f"{self.workers}, {bits / unit:g} {name}" + (f", one {self.slowdown:g}× slower" if self.slowdown > 1.0 else "")

    @property
    def overrides(self) -> list[str]:
        """Of conf/planning.yaml."""
        slow = ["cluster=one_slow", f"cluster.factor={self.slowdown}"] if self.slowdown > 1.0 else []
        return [
            f"trainer.devices={self.workers}",
            f"workers=[{self.workers}]",
            "links=uniform",
            f"links.bandwidth={self.bandwidth}",
            "strategy=ddp",
            f"target={TARGET}",
            "compute.law=erlang",
            "compute.options={shape: 16}",
            "run_dir=unused",
            *slow,
        ]


_CHOSEN = (
    Situation(2, 1e3),
    Situation(4, 1e3, 10.0),
    Situation(4, 1.25e8),
    Situation(8, 1e3),
    Situation(8, 1e4, 10.0),
    Situation(8, 1e5),
    Situation(16, 1e4),
    Situation(16, 1e6, 10.0),
    Situation(32, 1e5),
    Situation(32, 1.25e8, 10.0),
    Situation(64, 1e6),
    Situation(64, 1.25e10, 10.0),
    # not looked at while the planner was made
    Situation(4, 1e5),
    Situation(16, 1e5, 4.0),
    Situation(32, 1e4),
    Situation(64, 1e5),
)


def drawn(count: int, seed: int) -> tuple[Situation, ...]:
    """Clusters at random: workers and links evenly in their logarithms, every second one with a slow worker."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        bandwidth = float(f"{10 ** generator.uniform(3.0, 9.0):.1g}")
        workers, slowdown = 2 ** generator.randint(1, 6), float(generator.choice((3, 5, 10))) if number % 2 else 1.0
        found.append(Situation(workers, bandwidth, slowdown))
    return tuple(found)


SITUATIONS = (*_CHOSEN, *drawn(12, seed=1130))


class Truth(NamedTuple):
    """What became of a setting in the simulator."""

    name: str
    lr: float
    seconds: float  # mean over the seeds; infinite if one of them does not reach the target in time
    share_apart: float | None = None  # of the workers' own losses there, that is of their distance to the mean model


def simulated(
    cfg: DictConfig, scenario: Scenario, strategy: Strategy, lr: float, target: float, *, seeds: Sequence[int], at_most_s: float
) -> tuple[float, float | None]:
    """Virtual seconds until the loss is at the target, and the share of the workers' own losses that is of their distance to
    the mean model then; means over the seeds. Infinite and None if one takes longer than allowed."""
    options = scenario.problem.optimizer
    assert isinstance(options, SGD)
    optimizer = SGD(lr=lr, momentum=options.momentum, weight_decay=options.weight_decay)
    work: Any = scenario.work
    assert scenario.problem.objective is not None
    epochs = max(1, math.ceil(_STEPS * cfg.trainer.devices / work.batches))
    seconds, shares = [], []
    for seed in seeds:
        result = simulate(
            strategy,
            scenario.cluster,
            work=type(work)(number=epochs, batches=work.batches, batch_size=work.batch_size),
            links=scenario.links,
            objective=scenario.problem.objective,
            optimizer=optimizer,
            seed=seed,
            recording=Recording(evaluate_every=cfg.trainer.devices),
            target_loss=target,
            until_s=None if math.isinf(at_most_s) else at_most_s,
        )
        if result.ended != "target":
            return math.inf, None
        seconds.append(result.time_s)
        assert result.models is not None
        assert result.loss is not None
        own = statistics.fmean(scenario.problem.objective.loss(model) for model in result.models[:_LOOKED_AT])
        shares.append(1.0 - result.loss / own)
    return statistics.fmean(seconds), statistics.fmean(shares)


def candidates(
    cfg: DictConfig, situation: Situation, names: Sequence[str]
) -> tuple[Planner, Candidate, list[Candidate], Candidate]:
    """The planner, the present setting, all that it looks at, and its choice."""
    spectrum = curvature.curvature_of(cfg, workers=situation.workers, run=None)
    planner = Planner(known.known_from(cfg, None, spectrum), cfg.target, cfg.margin)
    strategies = compose_strategies(cfg, names, situation.overrides, config="planning")
    every = planner.all(strategies, [situation.workers])
    now = next(one for one in every if one.name == "ddp")
    best = refined(planner, soonest(every, now), lambda _: lambda _: None)
    return planner, now, every, best


def judge(situation: Situation, *, seeds: Sequence[int] = SEEDS, strategies: Sequence[str] = STRATEGIES) -> dict[str, Any]:
    """Plan, and simulate every candidate.

    Args:
        situation: the cluster.
        seeds: of the simulations.
        strategies: that the plan may choose among, ``ddp`` first.
    """
    cfg = compose("planning", situation.overrides)
    planner, now, every, best = candidates(cfg, situation, strategies)
    scenario = scenario_of(compose("planning", [*situation.overrides, "objective=recipe"]))
    noise = planner.known.curvature.noise
    assert noise is not None
    target = TARGET * noise.loss
    settings = {(repr(one.strategy), lr): (one, lr) for one in (best, *every) for lr in (one.best_lr, one.lr)}
    truths: list[Truth] = []
    for one, lr in sorted(settings.values(), key=lambda setting: setting[0].best_time_s):
        limit = _LATE * min((truth.seconds for truth in truths), default=math.inf)
        seconds, apart = simulated(cfg, scenario, one.strategy, lr, target, seeds=seeds, at_most_s=limit)
        is_chosen = one.strategy == best.strategy and lr == best.best_lr
        truths.append(Truth(f"{one.name} (chosen)" if is_chosen else one.name, lr, seconds, apart))
    before, _ = simulated(cfg, scenario, AllReduce(), now.lr, target, seeds=seeds, at_most_s=math.inf)
    chosen = next(truth for truth in truths if truth.name.endswith("(chosen)"))
    soonest_of_all = min(truths, key=lambda truth: truth.seconds)
    return {
        "situation": situation.spoken,
        "target_loss": target,
        "chosen": best.name,
        "exchanges_per_step": best.times.exchanges_per_step,
        "lr": best.best_lr,
        "share_apart": best.share_apart,
        "simulated_share_apart": chosen.share_apart,
        "curvature_along_loss": planner.known.curvature.along_loss,
        "largest_curvature": planner.known.curvature.largest,
        "predicted_s": best.best_time_s,
        "simulated_s": chosen.seconds,
        "best": soonest_of_all.name,
        "best_s": soonest_of_all.seconds,
        "over_best": chosen.seconds / soonest_of_all.seconds,
        "predicted_gain": now.time_s / best.best_time_s,
        "ddp_s": before,
        "gain": before / chosen.seconds,
        "all": [truth._asdict() for truth in truths],
    }


def falling(workers: int) -> list[dict[str, float]]:
    """Noise and curvature after more and more epochs of synchronous training."""
    rows = []
    for epochs in _EPOCHS:
        cfg = compose("planning", [*Situation(workers, math.inf).overrides, f"curvature.epochs={epochs}", "links=none"])
        found = curvature.curvature_of(cfg, workers=workers, run=None)
        assert found.noise is not None
        noise = found.noise
        rows.append(
            {
                "workers": workers,
                "epochs": epochs,
                "loss": noise.loss,
                "variance_over_loss": noise.variance / noise.loss,
                "curvature_along_noise": noise.curvature,
                "largest_curvature": found.largest,
            }
        )
    return rows


def write_falling() -> None:
    """Measure and show it."""
    rows = [row for workers in (2, 8, 32) for row in falling(workers)]
    write_results("planning_curvature", {"rows": rows})
    names = list(rows[0])
    print_table(
        "As the loss falls",
        [name.replace("_", " ") for name in names],
        [[f"{row[name]:.3g}" for name in names] for row in rows],
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three situations, one seed")
    numbers = range(1, len(SITUATIONS) + 1)
    parser.add_argument("--situations", nargs="+", type=int, choices=numbers, metavar="NUMBER", help="others stay as measured")
    parser.add_argument("--curvature", action="store_true", help="measure noise and curvature along a training run instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    be_quiet()
    chosen = [SITUATIONS[number - 1] for number in options.situations or (numbers[::4] if options.quick else numbers)]
    measured = {}
    if options.situations and not options.quick:
        measured = {row["situation"]: row for row in json.loads((RESULTS / "planning.json").read_text())["situations"]}
    if options.curvature:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            write_falling()
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for situation in chosen:
            row = judge(situation, seeds=SEEDS[:1] if options.quick else SEEDS)
            print(row, flush=True)
            measured[row["situation"]] = row
            if not options.quick:
                write_results("planning", {"aim": AIM, "target": TARGET, "seeds": SEEDS, "situations": list(measured.values())})
    rows = [measured[situation.spoken] for situation in SITUATIONS if situation.spoken in measured]
    print_table(
        f"The recommended setting, simulated, over the best candidate (aim ≤ {AIM:g})",
        (
            "workers, links",
            "chosen",
            "lr",
            "predicted, s",
            "simulated, s",
            "over best",
            "best",
            "over DDP: predicted, simulated",
        ),
        [
            [
                row["situation"],
                row["chosen"],
                f"{row['lr']:.2g}",
                f"{row['predicted_s']:.2g}",
                f"{row['simulated_s']:.2g}",
                f"{row['over_best']:.2f}",
                row["best"],
                f"{row['predicted_gain']:.2g}, {row['gain']:.2g}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
