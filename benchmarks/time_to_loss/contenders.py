"""Who is compared. A new contender is one row of CONTENDERS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.time_to_loss import hooks
from benchmarks.time_to_loss.task import Task
from lightning_gossip import AdaptivePeriod, Outer
from lightning_gossip.simulation import ADPSGD, AllReduce, DiLoCo, NoLoCo, PeriodicAveraging, Strategy

PERIOD = 8
_RANK = 4  # of PowerSGD


@dataclass(frozen=True)
class Contender:
    """One row.

    Args:
        label: in tables and figures.
        colour: in figures; of the eight of Okabe and Ito, a family a colour.
        marker: in figures, so that no line needs its colour.
        strategy: makes it for a task.
        waits: for all others in all that it does, so that its models do not depend on how long that takes.
        factors: of DDP's learning rate, that are tried; it has DDP's own without any.
        second: is run when the others have been.
        like: has the learning rate of this contender, and tries none.
    """

    label: str
    colour: str
    marker: str
    strategy: Callable[[Task], Strategy]
    waits: bool = False
    factors: tuple[float, ...] = (1.0, 0.5)
    second: bool = False
    like: str | None = None


def _power_sgd(task: Task) -> hooks.PowerSGD:
    """Sends the share that its rank is of the small model: of the large one it would be a thirteenth of that, for what this one
    does not learn with."""
    shapes = task.shapes()
    return hooks.PowerSGD(shapes=shapes, rank=_RANK, share=hooks.share_of(shapes, _RANK))


def _averaging(**options: object) -> Callable[[Task], Strategy]:
    return lambda _: PeriodicAveraging(**{"period": PERIOD, **options})  # type: ignore[arg-type]


_GREEN, _BLUE, _SKY, _ORANGE = "#009E73", "#0072B2", "#56B4E9", "#E69F00"
_VERMILION, _PURPLE, _BLACK = "#D55E00", "#CC79A7", "#000000"
_ADAPTIVE = AdaptivePeriod(warmup_epochs=0)  # a run is one epoch

REFERENCE = "ddp"
CONTENDERS = {
    "ddp": Contender("DDP", _VERMILION, "o", lambda _: AllReduce(), waits=True, factors=()),
    "ddp_bf16": Contender("DDP, bf16 gradients", _ORANGE, "o", lambda _: hooks.Bfloat16(), waits=True, factors=(), second=True),
    "ddp_powersgd": Contender(f"DDP, PowerSGD rank {_RANK}", _ORANGE, "s", _power_sgd, waits=True, factors=(), second=True),
    "periodic": Contender(f"averaging every {PERIOD}", _SKY, "o", _averaging(), waits=True, second=True),
    "periodic_outer": Contender(
        f"averaging every {PERIOD}, outer (1, .5)", _SKY, "s", _averaging(outer=Outer()), waits=True, second=True
    ),
    "adaptive": Contender(
        "adaptive averaging", _BLUE, "o", _averaging(period=_ADAPTIVE), waits=True, like="periodic", second=True
    ),
    "adaptive_outer": Contender(
        "adaptive averaging, outer (1, .5)",
        _BLUE,
        "s",
        _averaging(period=_ADAPTIVE, outer=Outer()),
        waits=True,
        like="periodic_outer",
        second=True,
    ),
    "diloco": Contender("DiLoCo, H = 50, (.7, .9)", _PURPLE, "o", lambda _: DiLoCo(), waits=True),
    "adpsgd": Contender("AD-PSGD", _GREEN, "o", lambda _: ADPSGD()),
    "adpsgd_int8": Contender("AD-PSGD, int8", _GREEN, "s", lambda _: ADPSGD(wire="int8")),
    "adpsgd_few": Contender(
        "AD-PSGD, int8, 3 exchanges in 50 steps",
        _GREEN,
        "D",
        lambda _: ADPSGD(wire="int8", exchanges_per_step=0.06),
        second=True,
    ),
    "noloco": Contender("AD-PSGD, outer (1, .5): noloco", _GREEN, "^", lambda _: NoLoCo()),
}


def _diloco(period: int, outer: Outer) -> Contender:
    label = f"DiLoCo, H = {period}, ({outer.lr:.2g}, {outer.momentum:.2g})".replace("0.", ".")
    return Contender(label, _PURPLE, "s", lambda _: DiLoCo(period=period, outer=outer), waits=True, factors=(0.5,))


GRID = {  # the best of them is DiLoCo as it is tuned here
    f"diloco_{period}_{outer.lr:g}_{outer.momentum:g}": _diloco(period, outer)
    for period, outer in ((10, Outer(1.0, 0.5)), (25, Outer(1.0, 0.5)), (50, Outer(1.0, 0.5)))
}
KNOWN = {**CONTENDERS, **GRID}
