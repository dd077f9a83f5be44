"""What is to be said of outer steps, each thing once in a process."""

from __future__ import annotations

from lightning.fabric.utilities import rank_zero_warn
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from lightning_gossip.algorithm.outer import FEWEST_ROUNDS
from lightning_gossip.strategies.warning_cache import warning_cache


def say_once(subject: str, what: str) -> None:
    """Warn, unless something has been said about this subject before."""
    if subject not in warning_cache:
        warning_cache.add(subject)
        rank_zero_warn(what)


def warn_of_statistics(model: Module) -> None:
    """Running statistics belong to the weights before an outer step."""
    name = next((n for n, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None), None)
    if name is not None:
        say_once(
            "statistics",
            f"outer: the running statistics of the layer {name!r} take no part in outer steps, and after one belong to slightly"
            " other weights until they have followed. Use LayerNorm or GroupNorm, or accept it.",
        )


def warn_of_few_rounds(steps: float, round_steps: int) -> None:
    """Warn of a run that is too short for outer steps to pay.

    Args:
        steps: of a worker that have outer steps, in the whole run.
        round_steps: of one of its rounds.
    """
    rounds = int(steps / round_steps)
    if rounds < FEWEST_ROUNDS:
        say_once(
            "few rounds",
            f"outer: the run has {rounds} outer steps, each after {round_steps} local ones; fewer than {FEWEST_ROUNDS} have"
            " not been seen to pay. Take fewer local steps, or outer=None.",
        )


def warn_of_slow_exchanges(exchange_s: float, step_s: float, round_steps: int) -> None:
    """Warn of exchanges that last so long that most of what outer steps gain is lost.

    Args:
        exchange_s: that an exchange has lasted, on the average.
        step_s: that a step of this worker has.
        round_steps: of one of its rounds.
    """
    if exchange_s > step_s * round_steps / 4.0:
        say_once(
            "slow exchanges",
            f"outer: an exchange lasts as long as {exchange_s / step_s:.0f} steps of this worker, of {round_steps} between two"
            " outer steps; above a quarter of them most of the gain is lost. Take more local steps, or wire='int8'.",
        )
