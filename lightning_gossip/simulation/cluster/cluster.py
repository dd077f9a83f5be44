"""The workers: how long each computes, which are slow, which stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, is_finite
from lightning_gossip.algorithm.laws import Law, Samples
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.compute_times import ComputeTimes, generator_of


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class SlowPeriod:
    """A worker that is slow for a while: throttled, or beside a neighbour that needs the machine.

    Args:
        rank: which.
        from_s, until_s: virtual seconds; work that is under way then is slowed from then on, or until then.
        factor: how many times slower it computes meanwhile, ≥ 1.

    Raises:
        ConfigurationError: naming the key.
    """

    rank: int
    from_s: float
    until_s: float
    factor: float

    def __post_init__(self) -> None:
        check_integer("slow_periods.rank", self.rank, at_least=0, example=3)
        check_not_negative("slow_periods.from_s", self.from_s)
        if not is_finite(self.until_s) or self.until_s <= self.from_s:
            raise ConfigurationError(f"slow_periods.until_s={self.until_s!r} is not a time after from_s={self.from_s!r}.")
        if not is_finite(self.factor) or self.factor < 1.0:
            raise ConfigurationError(
                f"slow_periods.factor={self.factor!r} is not a factor of at least 1. Write for example 4.0."
            )


@clear_arguments
@dataclass(frozen=True)
class Cluster:
    """The workers of a simulated run.

    Args:
        workers: n, at least 1.
        compute: the law of a step's compute time, of all workers or one for each.
        slowdown: by rank, how many times slower that worker computes, ≥ 1; others have 1.
        failures: by rank, the second at which that worker stops for good: it computes, starts and answers nothing any more.
            AD-PSGD goes on without it, on a repaired graph, and hands out again what it has left of an epoch; under any other
            strategy the run ends there, as in the runtime.
        backward_share: of a step's compute time, the share after which an overlapped all-reduce may begin is
            1 − backward_share; in [0, 1]. A backward pass costs about twice a forward pass.
        slow_periods: workers that are slow for a while, beside ``slowdown``; those of one worker do not overlap.

    Raises:
        ConfigurationError: naming the key, for a value out of its range or a rank that does not exist.
    """

    workers: int
    compute: Law | Sequence[Law]
    slowdown: Mapping[int, float] = field(default_factory=dict)
    failures: Mapping[int, float] = field(default_factory=dict)
    backward_share: float = 2.0 / 3.0
    slow_periods: Sequence[SlowPeriod] = ()

    def __post_init__(self) -> None:
        check_integer("workers", self.workers, example=16)
        if isinstance(self.compute, Law):
            laws = (self.compute,) * self.workers
        else:
            laws = tuple(self.compute) if isinstance(self.compute, Sequence) else ()
            if len(laws) != self.workers or not all(isinstance(law, Law) for law in laws):
                raise ConfigurationError(
                    f"compute={self.compute!r} is neither a law of compute times nor one for each of {self.workers} workers."
                    " Write for example compute=Constant(0.1)."
                )
        self._check_ranks("slowdown", self.slowdown)
        for rank, factor in self.slowdown.items():
            if not is_finite(factor) or factor < 1.0:
                raise ConfigurationError(f"slowdown[{rank}]={factor!r} is not a factor of at least 1.")
        self._check_ranks("failures", self.failures)
        for rank, at_s in self.failures.items():
            check_not_negative(f"failures[{rank}]", at_s)
        if not is_finite(self.backward_share) or not 0.0 <= self.backward_share <= 1.0:
            raise ConfigurationError(f"backward_share={self.backward_share!r} is not in [0, 1]. Leave it out for 2/3.")
        object.__setattr__(self, "compute", laws)
        self._check_slow_periods()

    @classmethod
    def one_slow(cls, workers: int, compute: Law, *, rank: int = 0, factor: float, **options: Any) -> Cluster:
        """Equal workers but one.

        Args:
            workers, compute, options: as for the class.
            rank: which is slow.
            factor: how many times slower, ≥ 1.
        """
        return cls(workers, compute, slowdown={rank: factor}, **options)

    @classmethod
    def measured(cls, record: Mapping[str, Any], **options: Any) -> Cluster:
        """The workers of a real run, each with the compute times that were measured there.

        Args:
            record: what a recipe's ``record.json`` holds, ``{"workers": [{"rank", "spans": [[activity, start_s, end_s, peer],
                …]}, …]}``; spans of the activity ``"compute"`` are the samples. Of a run whose workers do not wait for each
                other inside a step (``adpsgd``, not ``ddp``), short enough that a span is one step (10,000 spans a worker).
            options: as for the class.

        Raises:
            ConfigurationError: if it is no such record.
        """
        try:
            workers = sorted(record["workers"], key=lambda worker: worker["rank"])
            laws = [Samples([end_s - start_s for start_s, end_s in _computing(worker["spans"])]) for worker in workers]
        except (KeyError, TypeError, ValueError) as error:
            reason = error if isinstance(error, ConfigurationError) else repr(error)
            raise ConfigurationError(
                f"record: this is not the record of a run with each worker's compute times ({reason})."
                " Pass what a training run wrote into record.json."
            ) from error
        return cls(len(laws), laws, **options)

    def compute_times(self, seed: int, now_s: Callable[[], float] = lambda: 0.0) -> list[ComputeTimes]:
        """Each worker's compute times, by rank.

        Args:
            seed: of them.
            now_s: the virtual time.
        """
        assert not isinstance(self.compute, Law)
        return [
            ComputeTimes(
                law,
                float(self.slowdown.get(rank, 1.0)),
                generator_of(seed, 0, rank),
                slow_s=[(one.from_s, one.until_s, one.factor) for one in self.slow_periods if one.rank == rank],
                now_s=now_s,
            )
            for rank, law in enumerate(self.compute)
        ]

    def _check_slow_periods(self) -> None:
        if not isinstance(self.slow_periods, Sequence) or not all(isinstance(one, SlowPeriod) for one in self.slow_periods):
            raise ConfigurationError(
                f"slow_periods={self.slow_periods!r} is not a list of SlowPeriod. Write for example"
                " slow_periods=[SlowPeriod(rank=3, from_s=2.0, until_s=8.0, factor=4.0)]."
            )
        self._check_ranks("slow_periods", {one.rank: one.factor for one in self.slow_periods})
        in_order = sorted(self.slow_periods, key=lambda one: (one.rank, one.from_s))
        for before, after in pairwise(in_order):
            if before.rank == after.rank and after.from_s < before.until_s:
                raise ConfigurationError(
                    f"slow_periods of rank {after.rank} overlap: one ends at {before.until_s:g} s and another begins at"
                    f" {after.from_s:g} s."
                )
        object.__setattr__(self, "slow_periods", tuple(in_order))

    def _check_ranks(self, name: str, ranks: Mapping[int, float]) -> None:
        if not isinstance(ranks, Mapping):
            raise ConfigurationError(f"{name}={ranks!r} is not a mapping from ranks. Write for example {name}={{3: 10.0}}.")
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.workers:
                raise ConfigurationError(f"{name} names the rank {rank!r}: ranks are 0 to {self.workers - 1}.")


def _computing(spans: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
    """The stretches in which a worker computed."""
    return [(start_s, end_s) for activity, start_s, end_s, *_ in spans if activity == "compute" and end_s > start_s]
