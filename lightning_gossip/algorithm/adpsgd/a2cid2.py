"""A²CiD²: a second copy of each worker's model, with which pairwise averaging acts like twice as much of it on a slow graph.

Nabli, Belilovsky, Oyallon: *A²CiD²: Accelerating Asynchronous Communication in Decentralized Deep Learning*, NeurIPS 2023,
arXiv 2306.08289. Beside x a worker has x̃; in a time Δt between two events they mix, and an exchange moves x̃ further than x:

    (x, x̃) ← exp(Δt [[−η, η], [η, −η]]) (x, x̃) ;    x ← x + ½ (x_j − x) ,  x̃ ← x̃ + α̃ (x_j − x) ;    both ← both − γ g

    η = ½/√(χ₁ χ₂) ,  α̃ = ½ √(χ₁/χ₂) ,   χ₁ = 1/λ₂(L) ,  χ₂ = max over edges (i, j) of ½ (e_i − e_j)ᵀ L⁺ (e_i − e_j)

with L the graph's Laplacian whose weights are the rates of exchanges, here in exchanges of an edge during one step of a worker.

What is kept is e = x̃ − x, one vector, which no gradient changes: at a step boundary

    x ← x + c e ,  e ← (1 − 2c) e ,  c = ½ (1 − e^{−2η})     then, with the merges m:   x ← x + m ,  e ← e + (2α̃ − 1) m

and then x is published, so that what others get is mixed. Departure from the paper: time is counted in the worker's own steps,
and merges come into x and x̃ at the next step boundary, as everything does here. Σ over the workers of 2 (x + m) + e +
(2α̃ − 1) m changes by local updates only, whatever the order of events.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gossip.algorithm.topology.mixing import expected_pair_matrix
from lightning_gossip.algorithm.topology.topology import Topology


class Acceleration(NamedTuple):
    """η, per step of a worker, and α̃."""

    mixing: float
    gain: float


def acceleration(topology: Topology, exchanges_per_step: float) -> Acceleration:
    """The constants of a graph.

    Args:
        topology: who averages with whom.
        exchanges_per_step: that a worker takes part in during one step, above 0.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> [round(value, 4) for value in acceleration(ring(16), 1.0)]
    [0.1425, 1.8717]
    """
    n = topology.n
    if n == 1 or exchanges_per_step <= 0.0:
        return Acceleration(0.0, 0.5)  # nobody to exchange with
    laplacian = n * exchanges_per_step * (np.eye(n) - expected_pair_matrix(topology, exchanges="symmetric"))
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    slowest = 1.0 / float(np.linalg.eigvalsh(laplacian)[1])
    resistance = max(0.5 * float(inverse[i, i] + inverse[j, j] - 2.0 * inverse[i, j]) for i, j in topology.edges)
    return Acceleration(0.5 / math.sqrt(slowest * resistance), 0.5 * math.sqrt(slowest / resistance))


class SecondCopy:
    """e = x̃ − x of one worker; memory: one copy of its parameters.

    Args:
        x: the parameters; e begins with 0.
        constants: η and α̃.

    >>> x = [torch.zeros(1)]
    >>> second = SecondCopy(x, Acceleration(mixing=0.5 * math.log(2.0), gain=2.0))
    >>> with second.merging(x):
    ...     x[0] += 1.0
    >>> second.difference[0].item()  # (2·2 − 1)·1
    3.0
    >>> second.mix(x)
    >>> x[0].item(), second.difference[0].item()
    (1.75, 1.5)
    """

    def __init__(self, x: Sequence[Tensor], constants: Acceleration) -> None:
        self.constants = constants
        self.difference = [torch.zeros_like(tensor) for tensor in x]

    def fits(self, x: Sequence[Tensor]) -> bool:
        """Whether these parameters have the shapes of those that it was made of, on the same devices."""
        mine = [(of.shape, of.device, of.dtype) for of in self.difference]
        return mine == [(tensor.shape, tensor.device, tensor.dtype) for tensor in x]

    @torch.no_grad()
    def mix(self, x: Sequence[Tensor]) -> None:
        """x and x̃ come closer by what one step brings; before x is published."""
        if self.difference:
            share = 0.5 * (1.0 - math.exp(-2.0 * self.constants.mixing))
            torch._foreach_add_(list(x), self.difference, alpha=share)
            torch._foreach_mul_(self.difference, 1.0 - 2.0 * share)

    @contextmanager
    def merging(self, x: Sequence[Tensor]) -> Iterator[None]:
        """Inside, x takes over merges, and nothing else."""
        further = 2.0 * self.constants.gain - 1.0
        if not self.difference or further == 0.0:
            yield
            return
        with torch.no_grad():
            torch._foreach_add_(self.difference, list(x), alpha=-further)
            try:
                yield
            finally:
                torch._foreach_add_(self.difference, list(x), alpha=further)

    def begin(self) -> None:
        """x̃ ← x."""
        if self.difference:
            torch._foreach_zero_(self.difference)
