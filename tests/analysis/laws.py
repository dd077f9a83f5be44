"""Laws of delays that the tests run over."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_gossip.algorithm.laws import Constant, Erlang, Exponential, LogNormal, Samples, Uniform
from lightning_gossip.analysis.delays.combined import Repeated, Sum
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Gamma, constant

LAWS = {
    "constant": Constant(0.2),
    "exponential": Exponential(0.2),
    "shifted exponential": Exponential(0.2, spread=0.3),
    "erlang": Erlang(0.2, 4),
    "lognormal": LogNormal(0.2, 0.5),
    "wide lognormal": LogNormal(0.2, 1.0),
    "uniform": Uniform(0.2, 0.4),
    "samples": Samples([0.1, 0.3, 0.2]),
}
DELAYS: dict[str, Delay] = {
    **{name: delay_of(law) for name, law in LAWS.items()},
    "gamma": Gamma(0.2, 2.7),
    "two kinds": Atoms([0.01, 0.9], [0.8, 0.2]),
    "with momentum": Sum(constant(0.1), Repeated(constant(0.1), 0.5)),
}

_times = st.floats(0.0, 5.0)
delays = st.one_of(
    st.floats(0.05, 5.0).map(constant),
    st.builds(Gamma, st.floats(0.05, 5.0), st.floats(0.5, 12.0)),
    st.builds(Sum, st.floats(0.05, 2.0).map(constant), st.builds(Gamma, st.floats(0.05, 5.0), st.floats(0.5, 12.0))),
    st.builds(
        lambda time, step, share: Sum(constant(time), Repeated(constant(step), share)),
        st.floats(0.05, 2.0),
        st.floats(0.05, 2.0),
        st.floats(0.05, 0.9),
    ),
    st.builds(lambda mean, spread: delay_of(Uniform(mean, spread)), st.floats(0.05, 5.0), st.floats(0.05, 1.0)),
    st.builds(lambda mean, sigma: delay_of(LogNormal(mean, sigma)), st.floats(0.05, 5.0), st.floats(0.05, 0.8)),
    st.lists(_times, min_size=1, max_size=6).filter(lambda times: max(times) > 0.05).map(Atoms),
)
"""Delays of every kind, of a mean between a few hundredths and five."""
