"""Who is compared. A new contender is one row of CONTENDERS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.time_to_loss import hooks, task
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
        strategy: makes it.
        waits: for all others in all that it does, so that its models do not depend on how long that takes.
        factors: of DDP's learning rate, that are tried; it has DDP's own without any.
        second: is run when the others have been.
        like: has the learning rate of this contender, and tries none.
    """

    label: str
    colour: str
    marker: str
    strategy: Callable[[], Strategy]
    waits: bool = False
    factors: tuple[float, ...] = (1.0, 0.5)
    second: bool = False
    like: str | None = None


def _power_sgd() -> hooks.PowerSGD:
    share = hooks.share_of(task.shapes(task.LARGE), _RANK)
    return hooks.PowerSGD(shapes=task.shapes_in_order(), rank=_RANK, share=share)


def _averaging(**options: object) -> Callable[[], Strategy]:
    return lambda: PeriodicAveraging(**{"period": PERIOD, **options})  # type: ignore[arg-type]


_GREEN, _BLUE, _SKY, _ORANGE = "#009E73", "#0072B2", "#56B4E9", "#E69F00"
_VERMILION, _PURPLE, _BLACK = "#D55E00", "#CC79A7", "#000000"
_ADAPTIVE = AdaptivePeriod(warmup_epochs=0)  # a run is one epoch

REFERENCE = "ddp"
CONTENDERS = {
    "ddp": Contender("DDP", _VERMILION, "o", AllReduce, waits=True, factors=()),
    "ddp_bf16": Contender("DDP, bf16 gradients", _ORANGE, "o", hooks.Bfloat16, waits=True, factors=(), second=True),
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
    "diloco": Contender("DiLoCo, H = 50, (.7, .9)", _PURPLE, "o", DiLoCo, waits=True),
    "adpsgd": Contender("AD-PSGD", _GREEN, "o", ADPSGD),
    "adpsgd_int8": Contender("AD-PSGD, int8", _GREEN, "s", lambda: ADPSGD(wire="int8")),
    "adpsgd_few": Contender(
        "AD-PSGD, int8, 3 exchanges in 50 steps", _GREEN, "D", lambda: ADPSGD(wire="int8", exchanges_per_step=0.06), second=True
    ),
    "noloco": Contender("AD-PSGD, outer (1, .5): noloco", _GREEN, "^", NoLoCo),
}


def _diloco(period: int, outer: Outer) -> Contender:
    label = f"DiLoCo, H = {period}, ({outer.lr:.2g}, {outer.momentum:.2g})".replace("0.", ".")
    return Contender(label, _PURPLE, "s", lambda: DiLoCo(period=period, outer=outer), waits=True, factors=(0.5,))


GRID = {  # the best of them is DiLoCo as it is tuned here
    f"diloco_{period}_{outer.lr:g}_{outer.momentum:g}": _diloco(period, outer)
    for period, outer in ((10, Outer(1.0, 0.5)), (25, Outer(1.0, 0.5)), (50, Outer(1.0, 0.5)))
}
KNOWN = {**CONTENDERS, **GRID}
