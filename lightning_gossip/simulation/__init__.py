"""Any cluster under virtual time: the package's own algorithm objects; only time, links and compute are simulated (SimPy)."""

from lightning_gossip.simulation.adpsgd import ADPSGD
from lightning_gossip.simulation.averaging import AdaptiveAveraging, PeriodicAveraging
from lightning_gossip.simulation.classifiers import Classes, Classifier, digits, mlp, softmax_regression
from lightning_gossip.simulation.cluster import Cluster
from lightning_gossip.simulation.laws import (
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
from lightning_gossip.simulation.links import Links, RandomSlowdowns
from lightning_gossip.simulation.lockstep import QSGD, AllReduce
from lightning_gossip.simulation.neighbours import DPSGD
from lightning_gossip.simulation.objectives import Objective, Quadratic
from lightning_gossip.simulation.optimizer import SGD
from lightning_gossip.simulation.record import EpochRecord, Point, Recording, Span, TraceEvent, WorkerAccount
from lightning_gossip.simulation.result import Result
from lightning_gossip.simulation.run import Strategy
from lightning_gossip.simulation.server import APSGD
from lightning_gossip.simulation.simulate import simulate
from lightning_gossip.simulation.strategies import STRATEGIES, make_strategy
from lightning_gossip.simulation.work import Epochs, Steps

__all__ = [
    "ADPSGD",
    "APSGD",
    "DPSGD",
    "LAWS",
    "QSGD",
    "SGD",
    "STRATEGIES",
    "AdaptiveAveraging",
    "AllReduce",
    "Classes",
    "Classifier",
    "Cluster",
    "Constant",
    "EpochRecord",
    "Epochs",
    "Erlang",
    "Exponential",
    "Law",
    "Links",
    "LogNormal",
    "Objective",
    "PeriodicAveraging",
    "Point",
    "Quadratic",
    "RandomSlowdowns",
    "Recording",
    "Result",
    "Samples",
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
