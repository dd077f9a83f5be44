"""Options of several algorithms, in a real run and in a simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_gossip.algorithm.checks import check_choice

WorkSharing = Literal["auto"] | bool
AtRendezvous = Literal["adopt", "evaluate"]


class Options:
    """What an algorithm is told, as a frozen dataclass; each one checks its own fields and calls the next."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigurationError: naming the option.
        """


@dataclass(frozen=True, kw_only=True)
class EpochEndOptions(Options):
    """What becomes of the mean model at an epoch's end.

    Args:
        at_rendezvous: ``"adopt"`` makes every worker take the mean; ``"evaluate"`` only looks at it.
    """

    at_rendezvous: AtRendezvous = "adopt"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("at_rendezvous", self.at_rendezvous, get_args(AtRendezvous))


@dataclass(frozen=True, kw_only=True)
class EpochOptions(EpochEndOptions):
    """How an epoch is shared out, and what becomes of the mean model at its end.

    Args:
        work_sharing: ``"auto"`` and ``True`` share an epoch by the claim rule; ``False`` gives equal shares.
    """

    work_sharing: WorkSharing = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("work_sharing", self.work_sharing, (True, False, "auto"))
