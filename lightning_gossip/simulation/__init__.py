"""Any cluster under virtual time: the package's own algorithm objects; only time, links and compute are simulated (SimPy).

:func:`simulate` is the one call. Replica, partner choice, pace, period controllers, quantizer, parameter server, staleness
counters and the claim rule are those of a real run; given one order of events, simulator and runtime make the same models to
the bit (``tests/simulation/test_equivalence.py``).

What is idealised:

- a claim of a batch takes no time, and everybody's step time is known to all at once;
- a step is one stretch of computing: no loading of data, no validation, no time to copy a model;
- an exchange goes in one piece, not in chunks, and a port serves one exchange without loss;
- DDP's overlap is the best that buckets could do, and collectives are rings by rank;
- the rounds of D-PSGD, and an all-reduce on a bottleneck, find all their transfers under way at once;
- a link that is slow when a transfer begins stays so until it ends.
"""

from lightning_gossip.algorithm.laws import (
    LAWS,
    Constant,
    Erlang,
    Exponential,
    Law,
    LogNormal,
    Samples,
    Uniform,
    make_law,
)
from lightning_gossip.simulation.cluster.cluster import Cluster, SlowPeriod
from lightning_gossip.simulation.cluster.cluster_file import ClusterFile
from lightning_gossip.simulation.cluster.links import Links, RandomSlowdowns
from lightning_gossip.simulation.cluster.nodes import Nodes
from lightning_gossip.simulation.problems.classifiers import Classes, Classifier, digits, mlp, softmax_regression
from lightning_gossip.simulation.problems.objectives import Objective, Quadratic
from lightning_gossip.simulation.problems.sgd import SGD
from lightning_gossip.simulation.problems.work import Epochs, Steps
from lightning_gossip.simulation.record import EpochRecord, Point, Recording, Span, TraceEvent, WorkerAccount
from lightning_gossip.simulation.result import Result
from lightning_gossip.simulation.run import Strategy
from lightning_gossip.simulation.simulate import simulate
from lightning_gossip.simulation.strategies.adpsgd import ADPSGD, NoLoCo
from lightning_gossip.simulation.strategies.apsgd import APSGD
from lightning_gossip.simulation.strategies.dpsgd import DPSGD
from lightning_gossip.simulation.strategies.eamsgd import EAMSGD
from lightning_gossip.simulation.strategies.periodic_averaging import AdaptiveAveraging, DiLoCo, PeriodicAveraging
from lightning_gossip.simulation.strategies.registry import STRATEGIES, make_strategy
from lightning_gossip.simulation.strategies.synchronous import QSGD, AllReduce

__all__ = [
    "ADPSGD",
    "APSGD",
    "DPSGD",
    "EAMSGD",
    "LAWS",
    "QSGD",
    "SGD",
    "STRATEGIES",
    "AdaptiveAveraging",
    "AllReduce",
    "Classes",
    "Classifier",
    "Cluster",
    "ClusterFile",
    "Constant",
    "DiLoCo",
    "EpochRecord",
    "Epochs",
    "Erlang",
    "Exponential",
    "Law",
    "Links",
    "LogNormal",
    "NoLoCo",
    "Nodes",
    "Objective",
    "PeriodicAveraging",
    "Point",
    "Quadratic",
    "RandomSlowdowns",
    "Recording",
    "Result",
    "Samples",
    "SlowPeriod",
    "Span",
    "Steps",
    "Strategy",
    "TraceEvent",
    "Uniform",
    "WorkerAccount",
    "digits",
    "make_law",
    "make_strategy",
    "mlp",
    "simulate",
    "softmax_regression",
]
