"""The papers, pure: tensors, numpy, networkx. No process, thread, clock, socket or Lightning below this package."""

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker, ResolvedRoles, Roles, resolve_roles
from lightning_gossip.algorithm.apsgd.options import EventTrigger, ServerOptions
from lightning_gossip.algorithm.apsgd.server import ParameterServer
from lightning_gossip.algorithm.compression.qsgd import Quantizer
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod, PeriodController, PostLocal
from lightning_gossip.algorithm.periodic_averaging.piecewise_period import PiecewisePeriod
from lightning_gossip.algorithm.staleness import StalenessHistogram, VersionCounter
from lightning_gossip.algorithm.topology.exact_graphs import (
    SEQUENCES,
    base,
    one_peer_exponential,
    one_peer_hypercube,
    simple_base,
)
from lightning_gossip.algorithm.topology.generators import (
    TOPOLOGIES,
    bipartite_complete,
    complete,
    exponential,
    from_edges,
    hypercube,
    make_sequence,
    make_topology,
    ring,
    star,
    torus,
)
from lightning_gossip.algorithm.topology.mixing import (
    ExchangeLaw,
    MixingWeights,
    check_doubly_stochastic,
    consensus_distance,
    expected_pair_matrix,
    mean_square_gap,
    mixing_matrix,
    pair_matrix,
    spectral_gap,
)
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.algorithm.topology.topology import Topology

__all__ = [
    "SEQUENCES",
    "TOPOLOGIES",
    "AdaptivePeriod",
    "ConstantPeriod",
    "EventTrigger",
    "ExchangeLaw",
    "MixingWeights",
    "Outer",
    "ParameterServer",
    "PartnerPicker",
    "PeriodController",
    "PiecewisePeriod",
    "PostLocal",
    "Quantizer",
    "ResolvedRoles",
    "Roles",
    "ServerOptions",
    "StalenessHistogram",
    "Topology",
    "TopologySequence",
    "VersionCounter",
    "base",
    "bipartite_complete",
    "check_doubly_stochastic",
    "complete",
    "consensus_distance",
    "expected_pair_matrix",
    "exponential",
    "from_edges",
    "hypercube",
    "make_sequence",
    "make_topology",
    "mean_square_gap",
    "mixing_matrix",
    "one_peer_exponential",
    "one_peer_hypercube",
    "pair_matrix",
    "resolve_roles",
    "ring",
    "simple_base",
    "spectral_gap",
    "star",
    "torus",
]
