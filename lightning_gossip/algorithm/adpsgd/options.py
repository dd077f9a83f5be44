"""What AD-PSGD is told, in a real run and in a simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerChoice, Roles, resolve_roles
from lightning_gossip.algorithm.checks import check_choice, check_integer, check_not_negative
from lightning_gossip.algorithm.compression.pairwise import Wire
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.algorithm.topology.options import TopologyOptions


@dataclass(frozen=True, kw_only=True)
class GossipOptions(TopologyOptions):
    """Who averages with whom, how often, and how a model is sent.

    Args:
        roles: ``"auto"``, ``"bipartite"`` or ``"symmetric"``.
        exchanges_per_step: averagings that a worker takes part in per step of its neighbourhood; 0 for none.
        wire: how a model is sent; see :mod:`lightning_gossip.algorithm.compression.pairwise`.
        push_every: steps between two pushes; more than 1 where exchanges are rarer than steps.
        partner_choice: ``"uniform"`` or ``"fast_links"``; see :mod:`lightning_gossip.algorithm.adpsgd.partner_sampler`.
    """

    roles: Roles = "auto"
    exchanges_per_step: float = 1.0
    push_every: int = 1
    wire: Wire = "float32"
    partner_choice: PartnerChoice = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("roles", self.roles, get_args(Roles))
        check_not_negative("exchanges_per_step", self.exchanges_per_step)
        check_integer("push_every", self.push_every, at_least=1, example=4)
        check_choice("wire", self.wire, get_args(Wire))
        check_choice("partner_choice", self.partner_choice, get_args(PartnerChoice))

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """
        resolve_roles(make_topology(self.topology, workers), self.roles)
