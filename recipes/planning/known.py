"""What a plan starts from: a configuration, or the folder of a training run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.checks import check_integer, check_positive, is_finite, is_integer
from lightning_gossip.analysis import Problem, delay_of
from lightning_gossip.analysis.mean.discrete import check_momentum
from lightning_gossip.simulation import Cluster, Links, Samples, Strategy
from lightning_gossip.strategies import STRATEGIES
from recipes.planning import curvature
from recipes.planning.times import Machines
from recipes.record import RECORD
from recipes.simulated.scenario import scenario_of, strategy_of
from recipes.summary import SUMMARY

_MOST = 256  # workers: a minute of simulation, and AD-PSGD's second moments in memory
_ATOMS = 400  # step times of a worker that are kept: its law to a fraction of a percent


@dataclass(frozen=True)
class LearningRate:
    """The recipe's learning rate.

    Args:
        key: of the configuration.
        value: there.
        per_workers: by how much the learning rate grows with each worker, over the value; None if it is the value itself.
    """

    key: str
    value: float
    per_workers: float | None = None

    def of(self, workers: int) -> float:
        """What a worker's optimizer has with so many workers: that of the global batch."""
        return self.value * (1.0 if self.per_workers is None else self.per_workers * workers)

    def value_for(self, lr: float, workers: int) -> float:
        """What the key must be for a learning rate."""
        return lr / (1.0 if self.per_workers is None else self.per_workers * workers)


@dataclass(frozen=True)
class Run:
    """A training run that was measured.

    Args:
        folder: of it.
        summary: its summary.json.
        cluster: its workers, each with its step times.
        link_s: seconds that a vector needs from one worker to another; None if nothing was sent.
    """

    folder: Path
    summary: Mapping[str, Any]
    cluster: Cluster
    link_s: float | None

    @property
    def staleness(self) -> float:
        """Mean over all steps."""
        workers = [worker for worker in self.summary["workers"] if worker["staleness_mean"] is not None]
        steps = sum(worker["steps"] for worker in workers)
        return float(sum(worker["staleness_mean"] * worker["steps"] for worker in workers) / steps)


@dataclass(frozen=True)
class Known:
    """Everything that a plan starts from.

    Args:
        machines: workers and links.
        strategy: that is planned, or was measured.
        workers: how many it has.
        lr: the recipe's.
        momentum, nesterov: the recipe's.
        curvature: of the loss.
        run: the measured one; None if it is a configuration.
        adaptive: whether the recipe's optimizer divides by the size of past gradients, as AdamW: no rule has its learning rate.
    """

    machines: Machines
    strategy: Strategy
    workers: int
    lr: LearningRate
    momentum: float
    nesterov: bool
    curvature: curvature.Curvature
    run: Run | None = None
    adaptive: bool = False

    @property
    def problem(self) -> Problem:
        """The quadratic with this spectrum; at the beginning every direction has the same part of the loss."""
        eigenvalues = self.curvature.eigenvalues
        return Problem(eigenvalues=eigenvalues, start=[h**-0.5 for h in eigenvalues])

    @property
    def variation(self) -> float:
        """Standard deviation over mean of a worker's step times, the mean over the workers."""
        laws = [delay_of(law) for law in self.machines.laws]
        return statistics.fmean(math.sqrt(law.variance) / law.mean for law in laws)


def check(cfg: DictConfig) -> None:
    """Refuse by name what cannot work, before any work.

    Args:
        cfg: composed from conf/planning.yaml.

    Raises:
        ConfigurationError: naming the key.
    """
    if cfg.measured is not None and not isinstance(cfg.measured, str):
        raise ConfigurationError(f"measured={cfg.measured!r} is not a folder. Write for example measured=outputs/DATE/TIME.")
    known = ("ddp", *STRATEGIES)
    for key, values in (("strategies", cfg.strategies), ("workers", cfg.workers)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not len(values):
            raise ConfigurationError(
                f"{key}={values!r} is not a list of at least one. Write for example {key}=[{_EXAMPLES[key]}]."
            )
    for name in cfg.strategies:
        if name not in known:
            raise ConfigurationError(f"strategies names {name!r}; the known ones are {', '.join(known)}.")
    for number in cfg.workers:
        if not is_integer(number, 1, _MOST):
            raise ConfigurationError(f"workers holds {number!r}, which is no integer in [1, {_MOST}]. Write workers=[4,8,16].")
    if cfg.most_workers is not None:
        check_integer("most_workers", cfg.most_workers, example=16, otherwise=", or null for as many as now")
    if not is_finite(cfg.target) or not 0.0 < cfg.target < 1.0:
        raise ConfigurationError(f"target={cfg.target!r} is not a share of the loss between 0 and 1. Write for example 0.01.")
    if not is_finite(cfg.margin) or cfg.margin < 1.0:
        raise ConfigurationError(f"margin={cfg.margin!r} is not a number of at least 1. Write for example 2.")
    learning_rate(cfg)
    check_momentum(cfg.recipe.model.get("momentum", 0.0), "recipe.model.momentum")
    check_integer("trainer.devices", cfg.trainer.devices, example=4)
    curvature.check(cfg.curvature)
    if cfg.measured is None and cfg.curvature.eigenvalues is None and cfg.curvature.largest is None:
        for key in sorted(OmegaConf.missing_keys(cfg.recipe)):
            raise ConfigurationError(
                f"{key} is not given, and without data there is no curvature. Write {key}=..., or"
                " curvature.largest=20 if it is known."
            )


_EXAMPLES = {"strategies": "ddp,adpsgd,apsgd", "workers": "4,8,16"}


def learning_rate(cfg: DictConfig) -> LearningRate:
    """The recipe's.

    Raises:
        ConfigurationError: if it is not above 0, or the recipe says it in a way that is not known here.
    """
    model = cfg.recipe.model
    for key, per_workers in (("lr", None), ("lr_per_256", cfg.recipe.data.batch_size / 256)):
        if key in model:
            check_positive(f"recipe.model.{key}", model[key])
            return LearningRate(f"recipe.model.{key}", float(model[key]), per_workers)
    raise ConfigurationError("recipe.model has neither lr nor lr_per_256: this recipe's learning rate is not known to a plan.")


def known_from(cfg: DictConfig, run: Run | None, spectrum: curvature.Curvature) -> Known:
    """What the configuration says, and the run where it says more.

    Args:
        cfg: composed from conf/planning.yaml, with the run's own choices.
        run: that was measured.
        spectrum: of the loss.
    """
    scenario = scenario_of(cfg)
    cluster, links = scenario.cluster, scenario.links
    if run is not None:
        cluster = run.cluster
        if links == Links() and run.link_s is not None:
            links = Links(latency_s=run.link_s)
    machines = Machines(cluster, links, scenario.model_bytes, cfg.recipe.data.batch_size, cfg.seed)
    strategy = strategy_of(cfg)
    strategy.check(cluster.workers)
    momentum = float(cfg.recipe.model.get("momentum", 0.0))
    recipe = get_class(cfg.recipe.model._target_)
    nesterov, adaptive = (bool(getattr(recipe, name, False)) for name in ("NESTEROV", "ADAPTIVE"))
    return Known(machines, strategy, cluster.workers, learning_rate(cfg), momentum, nesterov, spectrum, run, adaptive)


def measured_run(folder: Path, *, padded: bool = False) -> Run:
    """A training run's folder.

    Args:
        folder: of it.
        padded: whether an emulated cluster filled every batch up to a period: then waits are part of it, and not beside it.

    Raises:
        ConfigurationError: if there is none, or one whose workers waited for each other inside a step.
    """
    summary, record = _read(folder, SUMMARY), _read(folder, RECORD)
    try:
        strategy, workers = summary["strategy"], summary["workers"]
        stale = [worker["staleness_mean"] for worker in workers if worker["staleness_mean"] is not None]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"measured={folder}: {SUMMARY} is not the summary of a training run ({error!r}).") from error
    if not stale:
        raise ConfigurationError(
            f"measured={folder} is a run of {strategy}: its summary has no staleness, and its step times hold the waiting for"
            " others. Measure a run with strategy=apsgd or strategy=adpsgd; an epoch or two are enough."
        )
    cluster = Cluster.measured(record if padded else _without_waits(record))
    assert isinstance(cluster.compute, tuple)
    compute = [_shortened(law) for law in cluster.compute]
    return Run(folder, summary, Cluster(cluster.workers, compute), None if padded else _link_s(record, strategy))


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"measured={folder} has no {name} that can be read ({type(error).__name__}). Write the folder of a finished"
            " training run."
        ) from error


def _without_waits(record: Any) -> Any:
    """The same with compute spans that are shorter by what their worker waited for the server meanwhile."""
    try:
        workers = [{**worker, "spans": _computing(worker["spans"])} for worker in record["workers"]]
    except (KeyError, TypeError, ValueError):
        return record  # which is refused then
    return {**record, "workers": workers}


def _computing(spans: Sequence[Sequence[Any]]) -> list[tuple[str, float, float, None]]:
    waits = np.array([(start_s, end_s) for what, start_s, end_s, _ in spans if what == "wait"]).reshape(-1, 2)
    passed = np.concatenate([[0.0], np.cumsum(waits[:, 1] - waits[:, 0])])

    def waited_until(time_s: float) -> float:
        before = int(np.searchsorted(waits[:, 0], time_s))
        return float(passed[before]) - (max(0.0, float(waits[before - 1, 1]) - time_s) if before else 0.0)

    own = [(start_s, end_s) for what, start_s, end_s, _ in spans if what == "compute"]
    return [("compute", start_s + waited_until(end_s) - waited_until(start_s), end_s, None) for start_s, end_s in own]


def _shortened(law: Any) -> Samples:
    times = np.sort(np.asarray(law.times_s))
    if len(times) > _ATOMS:
        times = np.quantile(times, (np.arange(_ATOMS) + 0.5) / _ATOMS)
    return Samples(times.tolist())


def _link_s(record: Mapping[str, Any], strategy: str) -> float | None:
    """One vector's time between two workers: half a request at the server from another rank, or one exchange."""
    spans = [(worker["rank"], span) for worker in record["workers"] for span in worker["spans"]]
    if strategy == "apsgd":
        times = [end_s - start_s for rank, (what, start_s, end_s, peer) in spans if what == "wait" and peer not in (None, rank)]
        return 0.5 * statistics.fmean(times) if times else None
    times = [end_s - start_s for _, (what, start_s, end_s, _) in spans if what == "exchange"]
    return statistics.fmean(times) if times else None
