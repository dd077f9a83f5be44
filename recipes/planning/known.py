"""What a plan starts from: a configuration, or the folder of a training run."""

from __future__ import annotations

import csv
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
from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.analysis import Problem, delay_of
from lightning_gossip.analysis.mean.discrete import check_momentum
from lightning_gossip.analysis.planning.noisy_loss import Noise, shares_of
from lightning_gossip.simulation import Cluster, Epochs, Links, Samples, Strategy
from lightning_gossip.strategies import STRATEGIES
from recipes.planning import curvature
from recipes.planning.options import check_options
from recipes.planning.times import Machines
from recipes.record import METRICS, RECORD
from recipes.simulated.scenario import ISLANDS, scenario_of, strategy_of
from recipes.summary import SUMMARY

_SEEN = 0.4  # of the largest eigenvalue: the curvature along the noise, as measured on digits (0.4 to 0.55)
_ASSUMED = 0.25  # of the loss: what noise is taken to keep up in a synchronous run of now, if it is not known
_LEAST = 1e-12  # of a loss: one that is 0 has no noise in proportion to it
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

    @property
    def trained(self) -> bool:
        """Whether its training loss has fallen, from epoch to epoch: then its setting was stable."""
        path = self.folder / METRICS
        if not path.is_file():
            return False
        with path.open(encoding="utf-8") as file:
            losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]
        return len(losses) > 1 and losses[-1] < losses[0]


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
        noise_options: what the configuration says of the gradients' noise.
        run: the measured one; None if it is a configuration.
        adaptive: whether the recipe's optimizer divides by the size of past gradients, as AdamW: no rule has its learning rate.
        calm: factor of the noise, from what the measured run bore.
    """

    machines: Machines
    strategy: Strategy
    workers: int
    lr: LearningRate
    momentum: float
    nesterov: bool
    curvature: curvature.Curvature
    noise_options: DictConfig
    run: Run | None = None
    adaptive: bool = False
    calm: float = 1.0

    @property
    def noise(self) -> Noise:
        """The noise of one worker's gradients: given, measured, or a quarter of what a synchronous run of now can bear."""
        given, measured, h = self.noise_options, self.curvature.noise, self.curvature.eigenvalues
        seen = _SEEN * self.curvature.largest if given.curvature is None else given.curvature
        if measured is not None and given.curvature is None and given.variance is None:
            seen = measured.curvature
        shares = shares_of(h, seen)
        if given.variance is not None:
            return Noise(self.calm * given.variance, given.loss, shares, given.with_loss)
        loss = 1.0 if measured is None else max(measured.loss, _LEAST)
        variance = _ASSUMED * self._kept if measured is None else measured.variance
        return Noise(self.calm * variance, loss, shares, given.with_loss)

    @property
    def _kept(self) -> float:
        """Variance over loss with which noise keeps up all of a synchronous run's loss, 4 n (1 − β)/γ for small γh.

        With the part p of it a run takes 1/(1 − p) times as long.
        """
        return 4.0 * self.workers * (1.0 - self.momentum) / self.lr.of(self.workers)

    @property
    def noise_source(self) -> str:
        """Where the noise is from, in words."""
        given, measured = self.noise_options, self.curvature.noise
        if given.variance is not None:
            source = "given"
        elif measured is None:
            source = "assumed: a quarter of what the present learning rate bears"
        else:
            source = f"measured at a loss of {measured.loss:.2g}"
        return source if self.calm == 1.0 else f"{source}, lowered to what the measured run bore"

    @property
    def loss_is_known(self) -> bool:
        """Whether distances of models can be given in the unit of their parameters."""
        return self.noise_options.variance is not None or self.curvature.noise is not None

    @property
    def problem(self) -> Problem:
        """The quadratic with this spectrum. At the beginning the directions' parts of the loss are powers of their curvatures,
        such that the mean curvature along the loss is the known one; each has the same part where that is not known."""
        eigenvalues, along_loss = self.curvature.eigenvalues, self.curvature.along_loss
        parts = (1.0,) * len(eigenvalues) if along_loss is None else shares_of(eigenvalues, along_loss)
        return Problem(eigenvalues=eigenvalues, start=[(part / h) ** 0.5 for part, h in zip(parts, eigenvalues, strict=True)])

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
    check_options(cfg)
    known = ("ddp", *STRATEGIES, *(() if ISLANDS in STRATEGIES else (ISLANDS,)))
    for name in cfg.strategies:
        if name not in known:
            raise ConfigurationError(f"strategies names {name!r}; the known ones are {', '.join(known)}.")
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
    batches = scenario.work.batches if isinstance(scenario.work, Epochs) else None
    machines = Machines(cluster, links, scenario.model_bytes, cfg.recipe.data.batch_size, cfg.seed, batches)
    strategy = strategy_of(cfg)
    strategy.check_on(cluster.workers, links)
    momentum = float(cfg.recipe.model.get("momentum", 0.0))
    recipe = get_class(cfg.recipe.model._target_)
    nesterov, adaptive = (bool(getattr(recipe, name, False)) for name in ("NESTEROV", "ADAPTIVE"))
    return Known(
        machines, strategy, cluster.workers, learning_rate(cfg), momentum, nesterov, spectrum, cfg.noise, run, adaptive
    )


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
