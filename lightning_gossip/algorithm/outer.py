r"""The outer step: momentum over whole rounds of local steps. One rule for DiLoCo, SlowMo, NoLoCo and GASLoC.

Each worker makes H local steps, and then one outer step at its own step boundary:

    δ = x − φ ;  v ← μ v + δ ;  o = (η − 1) δ + η μ v  (Nesterov)  or  o = η v − δ  (heavy ball) ;  x ← x + o ;  φ ← x

| letter | here | what it is |
|---|---|---|
| x | ``x`` | the parameters, any inner optimizer's |
| φ | ``slow`` | the slow weights: x after the last outer step |
| v | ``velocity`` | the outer momentum |
| c | ``SlowWeights.steps`` of :mod:`.slow_weights` | own steps since the last outer step |
| H | ``local_steps``, ``period`` | own steps of a round |
| η, μ | ``Outer.lr``, ``Outer.momentum`` | outer learning rate and momentum |

What the momentum sees (``momentum_of``):

| event | ``"local"``: own progress only | ``"all"``: merges too |
|---|---|---|
| merges m are taken over, by an exchange or where all meet: x ← x + m | φ ← φ + m | φ stays |
| the model is given by others (joiner, adoption), or the run starts | φ ← x, v ← 0, c ← 0 | the same |
| η = 1, μ = 0 | o = 0: not a bit changes | the same |

With ``"all"`` and an exact mean as the merge before each outer step this is DiLoCo (Douillard et al. 2023, arXiv 2311.08105;
Nesterov: ``torch.optim.SGD`` on the mean of φ − x) and SlowMo (Wang et al. 2020, arXiv 1910.00643; heavy ball, α = η). With a
matching as that merge it is NoLoCo (heavy ball); with the merge at the start of a round, Nesterov and η = 1, GASLoC. All of
these are recalled, and held as identities in ``tests/algorithm/test_outer.py``. Under gossip ``"local"`` is the default: the
disagreement of the workers then decays for every η in (0, 1], every μ in [0, 1) and any delay of an exchange.

When does the disagreement grow under ``"all"``? On the complete graph with k exchanges of a worker in each round, (E|φ|²,
E⟨φ, v⟩, E|v|²) of one worker's difference to the mean, without noise, is multiplied in each round by

    M = [[1 − 2pc + p²c, 2q(1 − pc), q²], [c(p − 1), μ − μpc − qc, qμ], [c, −2μc, μ²]]
    c = 1 − (1 − 1/(n−1))^(nk/2) ;   p, q = η(1 + μ), ημ²  (Nesterov)  or  η, ημ  (heavy ball)

so it grows if the spectral radius is above 1. An exchange that lasts long makes it worse than that; μ < 1 − η/2, the limit of
small c, was enough for every delay that was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from lightning_gossip.algorithm.checks import check_choice, check_positive, is_finite
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

MomentumOf = Literal["auto", "local", "all"]
FEWEST_ROUNDS = 20  # with fewer an outer step did not pay in any run that was seen


@clear_arguments
@dataclass(frozen=True)
class Outer:
    """An outer step over rounds of local steps. The module says what it does.

    With a gain g = lr/(1 − momentum) a constant progress moves the model g times as far: use an inner learning rate of about
    1/g of DDP's, or less.

    Args:
        lr: η, above 0. Under gossip at most 1; with an exact mean below 2 (1 + μ)/(1 + 2μ) (Nesterov) or 2 (1 + μ).
        momentum: μ, in [0, 1).
        nesterov: Nesterov's form (DiLoCo), or the heavy ball (SlowMo, NoLoCo).
        momentum_of: what the momentum sees: ``"local"``, the worker's own progress; ``"all"``, that and the merges; ``"auto"``:
            ``"local"`` under gossip, ``"all"`` with an exact mean, which allows nothing else.

    Raises:
        ConfigurationError: if a value is out of its range.

    >>> Outer().gain, round(Outer(lr=0.7, momentum=0.9).gain, 6)
    (2.0, 7.0)
    """

    lr: float = 1.0
    momentum: float = 0.5
    nesterov: bool = True
    momentum_of: MomentumOf = "auto"

    def __post_init__(self) -> None:
        check_positive("outer.lr", self.lr)
        if not is_finite(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ConfigurationError(f"outer.momentum={self.momentum!r} is not in [0, 1). Write for example momentum=0.5.")
        check_choice("outer.nesterov", self.nesterov, (True, False))
        check_choice("outer.momentum_of", self.momentum_of, get_args(MomentumOf))

    @property
    def gain(self) -> float:
        """How far a constant progress moves the model, in the end, over how far it would without an outer step."""
        return self.lr / (1.0 - self.momentum)

    @property
    def follows_merges(self) -> bool:
        """Whether φ takes over merges as x does, under gossip."""
        return self.momentum_of != "all"

    def move(self, x: Sequence[Tensor], slow: Sequence[Tensor], velocity: Sequence[Tensor]) -> bool:
        """Begin an outer step: v ← μ v + δ, and o takes the place of φ.

        Args:
            x: the model, of any device and floating-point type; only read.
            slow: φ, as many tensors of the same shapes; holds o afterwards.
            velocity: v, as many tensors of the same shapes; changed in place.

        Returns:
            False if o is 0 whatever δ is; φ and v are of no use then.
        """
        if self.lr == 1.0 and self.momentum == 0.0:
            return False
        import torch  # here alone: commands look at options without it

        slow, velocity = list(slow), list(velocity)
        with torch.no_grad():
            torch._foreach_neg_(slow)
            torch._foreach_add_(slow, like(x, slow))  # δ
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, slow)
            if self.nesterov:
                torch._foreach_mul_(slow, self.lr - 1.0)
                torch._foreach_add_(slow, velocity, alpha=self.lr * self.momentum)
            else:
                torch._foreach_neg_(slow)
                torch._foreach_add_(slow, velocity, alpha=self.lr)
        return True

    def step(self, x: Sequence[Tensor], slow: Sequence[Tensor], velocity: Sequence[Tensor]) -> None:
        """Make a whole outer step: x ← x + o, φ ← x, in place.

        Args:
            x, slow, velocity: as for :meth:`move`.
        """
        if not x:
            return  # torch refuses empty lists
        import torch

        with torch.no_grad():
            if self.move(x, slow, velocity):
                for tensor, change in zip(x, slow, strict=True):
                    tensor.add_(change.to(tensor.device))
            torch._foreach_copy_(list(slow), list(x))


DILOCO = Outer(lr=0.7, momentum=0.9)  # of the paper, as recalled; Nesterov


def like(x: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors x on the devices, and of the types, of the others."""
    return [tensor.to(other.device, other.dtype) for tensor, other in zip(x, others, strict=True)]


# -- which pairs are stable ------------------------------------------------------------------------------------------------


def contraction(workers: int, exchanges: float) -> float:
    """c: the share of the disagreement's square that the exchanges of one round take away, on the complete graph.

    Args:
        workers: n, at least 2.
        exchanges: k, that a worker takes part in per round, at least 0.

    >>> [round(contraction(n, 1.0), 3) for n in (2, 8, 64)]
    [1.0, 0.46, 0.401]
    """
    pair = 1.0 - 1.0 / (workers - 1)
    return 1.0 - float(pair ** (0.5 * workers * exchanges))


def outer_map(outer: Outer, c: float) -> np.typing.NDArray[np.float64]:
    """M of the module's text: what one round does to (E|φ|², E⟨φ, v⟩, E|v|²) where the momentum sees merges, shape (3, 3).

    Args:
        outer: η, μ and the form.
        c: see :func:`contraction`.
    """
    lr, mu = outer.lr, outer.momentum
    p, q = (lr * (1.0 + mu), lr * mu * mu) if outer.nesterov else (lr, lr * mu)
    return np.array(
        [
            [1.0 - 2.0 * p * c + p * p * c, 2.0 * q * (1.0 - p * c), q * q],
            [c * (p - 1.0), mu - mu * p * c - q * c, q * mu],
            [c, -2.0 * mu * c, mu * mu],
        ]
    )


def growth(outer: Outer, workers: int, exchanges: float) -> float:
    """The factor of the disagreement's square from one round to the next, in the long run and without noise; below 1 it decays.

    Args:
        outer: the rule.
        workers: n, at least 2.
        exchanges: k, that a worker takes part in per round, at least 0.

    >>> [round(growth(Outer(0.7, 0.9, nesterov, "all"), 8, 1.0), 3) for nesterov in (True, False)]
    [0.956, 1.113]
    >>> round(growth(Outer(0.7, 0.9), 8, 1.0), 3)  # "local"
    0.81
    """
    c = contraction(workers, exchanges)
    if outer.follows_merges:
        return max(1.0 - c, outer.momentum**2)
    return float(np.abs(np.linalg.eigvals(outer_map(outer, c))).max())


def largest_momentum(outer: Outer, workers: int, exchanges: float) -> float:
    """The largest momentum in [0, 1) with which the disagreement does not grow, all else as given, to about 1e-4.

    >>> round(largest_momentum(Outer(1.0, 0.0, nesterov=False, momentum_of="all"), 8, 1.0), 3)
    0.687
    """
    low, high = 0.0, 1.0
    for _ in range(14):
        middle = 0.5 * (low + high)
        if growth(replace(outer, momentum=middle), workers, exchanges) < 1.0:
            low = middle
        else:
            high = middle
    return low


def check_exact(outer: Outer) -> None:
    """Refuse an outer step over exact means that cannot work.

    Raises:
        ConfigurationError: naming what can.
    """
    if outer.momentum_of == "local":
        raise ConfigurationError(
            "got outer.momentum_of='local' with an exact mean, after which all progress is everybody's. Leave momentum_of out."
        )
    lr, mu = outer.lr, outer.momentum
    limit = 2.0 * (1.0 + mu) / (1.0 + 2.0 * mu) if outer.nesterov else 2.0 * (1.0 + mu)
    if lr >= limit:
        raise ConfigurationError(
            f"got outer.lr={lr!r} with momentum={mu!r}: the mean itself grows from lr={limit:.3g} on. Write for example lr=1.0."
        )


def check_gossip(outer: Outer, workers: int, exchanges: float) -> None:
    """Refuse an outer step under gossip whose workers would drift apart.

    Args:
        outer: the rule.
        workers: n.
        exchanges: k, that a worker takes part in per round; 0: nobody exchanges anything, so nothing is refused.

    Raises:
        ConfigurationError: naming a pair that is stable.
    """
    if outer.lr > 1.0:
        raise ConfigurationError(
            f"got outer.lr={outer.lr!r}; under gossip it is above 0 and at most 1. Write for example lr=1.0."
        )
    if outer.follows_merges or workers < 2 or not exchanges:
        return
    factor = growth(outer, workers, exchanges)
    if factor >= 1.0:
        stable = int(100.0 * largest_momentum(outer, workers, exchanges)) / 100.0
        raise ConfigurationError(
            f"got outer.lr={outer.lr!r}, momentum={outer.momentum!r}, nesterov={outer.nesterov!r}, momentum_of='all' with"
            f" {workers} workers and {exchanges:g} exchanges of each in a round: the models would drift apart by a factor of"
            f" {factor:.3g} each round. Write momentum={stable:g} or less, or momentum_of='local'."
        )


def warnings_of(outer: Outer) -> list[str]:
    """What is to be said of a pair under gossip that is stable only while links are as fast as asked."""
    if outer.follows_merges or outer.momentum < 1.0 - outer.lr / 2.0:
        return []
    stable = max(0.0, int(100.0 * (1.0 - outer.lr / 2.0) - 1.0) / 100.0)
    return [
        f"outer: with momentum_of='all', lr={outer.lr:g} and momentum={outer.momentum:g} a link slower than asked, or an"
        f" exchange that lasts long, may let the models drift apart. Write momentum_of='local', or momentum={stable:g}."
    ]


def outer_of(value: Any) -> Outer | None:
    """An outer step as an option: an :class:`Outer`, None, or a mapping of its arguments (as configuration files have them).

    Raises:
        ConfigurationError: if it is none of these.
    """
    if value is None or isinstance(value, Outer):
        return value
    if isinstance(value, Mapping):
        return Outer(**value)
    raise ConfigurationError(f"outer={value!r} is neither an Outer nor None. Write for example outer=Outer(momentum=0.5).")
