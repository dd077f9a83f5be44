"""Staleness analysis: how many workers, which learning rate, which staleness bound are stable and fastest.

A reconstruction, from standard theory, of the framework of Yu, Chen and Poor (arXiv 2406.11159); the equations are not the
paper's own text. Pure: numpy and scipy, and torch for curvature. The laws of step times are those of the simulator.
"""

from lightning_gossip.algorithm.laws import LAWS, Constant, Erlang, Exponential, Law, LogNormal, Samples, Uniform, make_law
from lightning_gossip.analysis.convergence_rate import gradient_bound, least_updates, rho_bar, step_size
from lightning_gossip.analysis.delays.combined import Repeated, Sum
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Flat, Gamma, constant, histogram
from lightning_gossip.analysis.mean.discrete import (
    constant_staleness_fastest,
    constant_staleness_limit,
    own_limit,
    spectral_radius,
)
from lightning_gossip.analysis.mean.hitting import LossCurve, hitting_time, loss_curve, noise_floor
from lightning_gossip.analysis.mean.stability import (
    Fastest,
    convergence_speed,
    damping,
    decay_rate,
    dominant_root,
    fastest,
    of_staleness,
    stability_limit,
)
from lightning_gossip.analysis.planning.arrivals import Arrivals, RunTime, arrival_rate, arrivals, free_arrivals, run_time
from lightning_gossip.analysis.planning.schedule import Server
from lightning_gossip.analysis.planning.settings import Curve, Prediction, Setting
from lightning_gossip.analysis.problem import Problem
from lightning_gossip.analysis.second_moments.adpsgd import gossip_limit, gossip_rms_decay
from lightning_gossip.analysis.second_moments.mean_square import (
    exact_limit,
    mean_square_limit,
    random_staleness_limit,
    rms_decay_rate,
    stationary_variance,
)
from lightning_gossip.analysis.second_moments.memoryless import server_rms_decay

__all__ = [
    "LAWS",
    "Arrivals",
    "Atoms",
    "Constant",
    "Curve",
    "Delay",
    "Erlang",
    "Exponential",
    "Fastest",
    "Flat",
    "Gamma",
    "Law",
    "LogNormal",
    "LossCurve",
    "Prediction",
    "Problem",
    "Repeated",
    "RunTime",
    "Samples",
    "Server",
    "Setting",
    "Sum",
    "Uniform",
    "arrival_rate",
    "arrivals",
    "constant",
    "constant_staleness_fastest",
    "constant_staleness_limit",
    "convergence_speed",
    "damping",
    "decay_rate",
    "delay_of",
    "dominant_root",
    "exact_limit",
    "fastest",
    "free_arrivals",
    "gossip_limit",
    "gossip_rms_decay",
    "gradient_bound",
    "histogram",
    "hitting_time",
    "least_updates",
    "loss_curve",
    "make_law",
    "mean_square_limit",
    "noise_floor",
    "of_staleness",
    "own_limit",
    "random_staleness_limit",
    "rho_bar",
    "rms_decay_rate",
    "run_time",
    "server_rms_decay",
    "spectral_radius",
    "stability_limit",
    "stationary_variance",
    "step_size",
]
