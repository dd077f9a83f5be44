"""What AD-PSGD is told, in a real run and in a simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerChoice, Roles, resolve_roles
from lightning_gossip.algorithm.checks import check_choice, check_integer, check_not_negative, is_finite
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.outer import Outer, check_gossip, outer_of
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.algorithm.topology.options import TopologyOptions, TopologySpec
from lightning_gossip.errors import ConfigurationError

EXCHANGES_OF_A_ROUND = 3.0  # they won back more than the outer step itself in the runs that were seen
_DENSE_SHARE = 0.05
_LOCAL_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class GossipOptions(TopologyOptions):
    """Who averages with whom, how often, and how a model is sent.

    Args:
        topology: who averages with whom; ``"auto"`` is a ring below 8 workers, and the exponential graph from 8 on.
        roles: ``"auto"``, ``"bipartite"`` or ``"symmetric"``.
        exchanges_per_step: averagings that a worker takes part in per step of its neighbourhood; 0 for none. Default: 1, and
            3/``local_steps`` where these are given.
        wire: how a model is sent; see :mod:`lightning_gossip.algorithm.compression.pairwise`.
        push_every: steps between two pushes; more than 1 where exchanges are rarer than steps.
        partner_choice: ``"uniform"`` or ``"fast_links"``; see :mod:`lightning_gossip.algorithm.adpsgd.partner_sampler`.
        local_steps: H, own steps of a round, at least 1; None for no rounds, and for 50 with ``outer``.
        outer: what ends a round; see :mod:`lightning_gossip.algorithm.outer`.
        dense_share: share of the run, in [0, 1), at whose beginning there is an exchange in every step and no outer step.
            Default: 0.05 where ``local_steps`` are given, else 0.
        a2cid2: accelerate by a second copy of the model; see :mod:`lightning_gossip.algorithm.adpsgd.a2cid2`. Not with
            ``local_steps``.
    """

    topology: TopologySpec = "auto"
    roles: Roles = "auto"
    exchanges_per_step: float = None  # type: ignore[assignment]  # a number when this has been made
    push_every: int = 1
    wire: Wire = "float32"
    partner_choice: PartnerChoice = "uniform"
    local_steps: int | None = None
    outer: Outer | None = None
    dense_share: float = None  # type: ignore[assignment]  # a number when this has been made
    a2cid2: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("roles", self.roles, get_args(Roles))
        object.__setattr__(self, "outer", outer_of(self.outer))
        if self.local_steps is None and self.outer is not None:
            object.__setattr__(self, "local_steps", _LOCAL_STEPS)
        if self.local_steps is not None:
            check_integer("local_steps", self.local_steps, example=50)
        given = vars(self)
        if given["exchanges_per_step"] is None:
            rate = 1.0 if self.local_steps is None else EXCHANGES_OF_A_ROUND / self.local_steps
            object.__setattr__(self, "exchanges_per_step", rate)
        check_not_negative("exchanges_per_step", self.exchanges_per_step)
        if given["dense_share"] is None:
            object.__setattr__(self, "dense_share", 0.0 if self.local_steps is None else _DENSE_SHARE)
        if not is_finite(self.dense_share) or not 0.0 <= self.dense_share < 1.0:
            raise ConfigurationError(
                f"dense_share={self.dense_share!r} is not a share of the run in [0, 1). Write for example dense_share=0.05."
            )
        check_choice("a2cid2", self.a2cid2, (True, False))
        if self.a2cid2 and self.local_steps is not None:
            raise ConfigurationError(
                "a2cid2=True accelerates exchanges at every step, and local_steps and outer are for few. Leave either away."
            )
        check_integer("push_every", self.push_every, at_least=1, example=4)
        check_choice("wire", self.wire, get_args(Wire))
        check_choice("partner_choice", self.partner_choice, get_args(PartnerChoice))

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """
        resolve_roles(make_topology(self.topology, workers), self.roles)
        if self.outer is not None and self.local_steps is not None:
            check_gossip(self.outer, workers, self.exchanges_per_step * self.local_steps)
