"""DDP with compressed gradients, under virtual time: the arithmetic of torch's hooks on the simulated gradients.

- :class:`Bfloat16`: ``bf16_compress_hook``: each gradient is divided by n and rounded to bfloat16, then summed in it.
- :class:`PowerSGD`: ``powerSGD_hook`` (Vogels et al. 2019, arXiv 1905.13727), with error feedback and warm start. With M_i the
  gradient and the error of worker i, Q of the step before:

      P ← mean M_i Q, orthogonal columns ;  Q ← mean M_iᵀ P ;  every worker takes P Qᵀ and keeps the error M_i − P Qᵀ

  Vectors, and matrices that would save less than half, go whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.simulation.cluster.collective_costs import all_reduce_bytes, all_reduce_s
from lightning_gossip.simulation.run import Run
from lightning_gossip.simulation.strategies.synchronous import GradientAveraging

_LEAST_RATE = 2  # torch's min_compression_rate


@dataclass(frozen=True, kw_only=True)
class Compressed(GradientAveraging):
    """An all-reduce of fewer bytes, overlapped with the backward pass as DDP's.

    Args:
        share: of the gradient's bytes, that are sent.
    """

    name = "ddp_compressed"

    overlap: bool = True
    share: float = 1.0

    @override
    def averager(self, run: Run) -> Callable[[Tensor], Tensor]:
        return lambda gradients: gradients.mean(0)

    @override
    def cost(self, run: Run, at_s: float) -> tuple[float, int]:
        nbytes = round(run.nbytes * self.share)
        return all_reduce_s(run.links, run.living, nbytes, at_s=at_s, seed=run.seed), all_reduce_bytes(run.workers, nbytes)


@dataclass(frozen=True, kw_only=True)
class Bfloat16(Compressed):
    """Half the bytes."""

    name = "ddp_bf16"

    share: float = 0.5

    @override
    def averager(self, run: Run) -> Callable[[Tensor], Tensor]:
        def mean(gradients: Tensor) -> Tensor:
            parts = gradients.to(torch.bfloat16).div_(run.workers)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total.to(gradients.dtype)

        return mean


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressed):
    """Low-rank matrices.

    Args:
        shapes: of the model's parameters, in their order.
        rank: r, of a matrix as it is sent.
    """

    name = "ddp_powersgd"

    shapes: Sequence[Sequence[int]] = field(default=())
    rank: int = 4

    @override
    def averager(self, run: Run) -> Callable[[Tensor], Tensor]:
        return LowRank(self.shapes, self.rank, workers=run.workers, seed=run.seed)


class LowRank:
    """PowerSGD's mean of one run.

    Args:
        shapes: of the parameters.
        rank: r.
        workers: n.
        seed: of the first Q.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int, *, workers: int, seed: int) -> None:
        ends = list(accumulate(torch.Size(shape).numel() for shape in shapes))
        self._matrices: list[tuple[slice, int, int, int]] = []  # where, rows, columns, rank
        for start, end, shape in zip([0, *ends], ends, shapes, strict=False):
            if (size := compressed(shape, rank)) is not None:
                rows = shape[0]
                columns = (end - start) // rows
                self._matrices.append((slice(start, end), rows, columns, size // (rows + columns)))
        generator = torch.Generator().manual_seed(seed)
        self._q = [torch.randn(columns, r, generator=generator) for _, _, columns, r in self._matrices]
        self._errors = [torch.zeros(workers, rows, columns) for _, rows, columns, _ in self._matrices]

    def __call__(self, gradients: Tensor) -> Tensor:
        """From shape (n, d) to (d,)."""
        mean = gradients.mean(0)
        for number, (place, rows, columns, _) in enumerate(self._matrices):
            matrices = gradients[:, place].reshape(-1, rows, columns) + self._errors[number]
            p = orthogonal((matrices @ orthogonal(self._q[number])).mean(0))
            q = (matrices.transpose(1, 2) @ p).mean(0)
            replaced = p @ q.T
            self._q[number], self._errors[number] = q, matrices - replaced
            mean[place] = replaced.flatten()
        return mean


def orthogonal(matrix: Tensor) -> Tensor:
    """Orthonormal columns of the same span."""
    return torch.linalg.qr(matrix).Q


def compressed(shape: Sequence[int], rank: int) -> int | None:
    """Elements of P and Q; None for what goes whole."""
    if len(shape) < 2:
        return None
    rows = shape[0]
    columns = torch.Size(shape).numel() // rows
    rank = min(rank, rows, columns)
    elements = rank * (rows + columns)
    return elements if elements * _LEAST_RATE < rows * columns else None


def share_of(shapes: Sequence[Sequence[int]], rank: int) -> float:
    """Of a gradient's bytes, that PowerSGD sends."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = [compressed(shape, rank) for shape in shapes]
    return sum(size if few is None else few for size, few in zip(sizes, sent, strict=True)) / sum(sizes)
