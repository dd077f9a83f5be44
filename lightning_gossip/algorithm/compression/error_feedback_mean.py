r"""The mean of n vectors in fewer bytes: differences to the last mean, rounded, with the errors fed back.

Worker i keeps the last mean r, the same bits on all, and what rounding has kept from the others, e_i. Worker j owns the j-th
of n shards, and what the second rounding has kept from everybody there, E_j:

    δ_i = w_i − r + e_i ;   e_i ← δ_i − Q(δ_i)                     (every worker; the shards of Q(δ_i) go to their owners)
    μ_j = (1/n) Σ_i Q(δ_i) + E_j ;   E_j ← μ_j − Q(μ_j)            (the owner, on its shard; Q(μ_j) goes to all)
    w̄ = r + Q(μ) ;   r ← w̄

So nothing is lost: Σ_i (w̄ + e_i) + n E after it is Σ_i (w_i + e_i) + n E before it. Each worker sends 2 (n − 1)/n of Q's
bytes, as a ring all-reduce does of the vector's. Error feedback: Seide et al. 2014 (1-bit SGD); both ways: Tang et al. 2019
(DoubleSqueeze, arXiv 1905.05957). Here of models and not of gradients: those of workers differ by a few steps only.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.compression.qsgd import Quantizer
from lightning_gossip.algorithm.compression.wires import MeanWire

_QUANTIZER = Quantizer(bits=8, bucket_size=1024)


def mean_bytes(wire: MeanWire, numel: int, workers: int, dtype: torch.dtype = torch.float32) -> int:
    """What an averaging sends round the ring, in bytes: each worker sends 2 (n − 1)/n of it.

    >>> [mean_bytes(wire, 4096, 4) for wire in get_args(MeanWire)]
    [16384, 8192, 4112]
    """
    shard = -(-numel // workers)
    if wire == "int8":
        return workers * _QUANTIZER.nbytes(shard)
    return workers * shard * 2 if wire == "bfloat16" else numel * dtype.itemsize


class CompressedMean:
    """Mean with error feedback, on one worker; all workers call the three steps in turn, and move the payloads between them.

    Args:
        reference: r, shape (d,), the same bits on all workers; it is kept and changed.
        workers: n.
        rank: of this worker.
        wire: ``"bfloat16"`` or ``"int8"``.
    """

    def __init__(self, reference: Tensor, *, workers: int, rank: int, wire: MeanWire) -> None:
        check_choice("wire", wire, get_args(MeanWire)[1:])
        self._workers, self._rank, self._rounds = workers, rank, wire == "bfloat16"
        self._shard = -(-reference.numel() // workers)
        self._reference = torch.nn.functional.pad(reference, (0, workers * self._shard - reference.numel()))
        self._numel = reference.numel()
        self._error = torch.zeros_like(self._reference)
        self._owned_error = reference.new_zeros(self._shard)

    def begin(self, vector: Tensor) -> Tensor:
        """Quantize this worker's change with its residual: Q(δ_i).

        Args:
            vector: w_i, shape (d,).

        Returns:
            One payload for each owner, uint8, shape (n, bytes).
        """
        delta = self._error.sub_(self._reference)
        delta[: self._numel] += vector
        payloads = torch.stack([self._encode(shard) for shard in torch.split(delta, self._shard)])
        for shard, payload in zip(torch.split(delta, self._shard), payloads, strict=True):
            shard.sub_(self._decode(payload))
        return payloads

    def reduce(self, payloads: Tensor) -> Tensor:
        """Average this worker's shard and quantize the mean: Q(μ_j).

        Args:
            payloads: everybody's for this shard, shape (n, bytes).

        Returns:
            Its payload, uint8, shape (bytes,).
        """
        mean = torch.zeros_like(self._owned_error)
        for payload in payloads:
            mean += self._decode(payload)
        mean = mean.div_(self._workers).add_(self._owned_error)
        result = self._encode(mean)
        self._owned_error = mean.sub_(self._decode(result))
        return result

    def end(self, payloads: Tensor) -> Tensor:
        """Assemble the mean w̄ of all shards.

        Args:
            payloads: Q(μ) of all shards, in the order of their owners, shape (n, bytes).

        Returns:
            w̄, shape (d,), valid until the next call.
        """
        for shard, payload in zip(torch.split(self._reference, self._shard), payloads, strict=True):
            shard.add_(self._decode(payload))
        return self._reference[: self._numel]

    def moved(self, change: Tensor) -> None:
        """Follow a move of the last mean, by all workers alike: the next differences refer to it, r ← r + change.

        Args:
            change: of its first elements, shape (≤ d,), the same bits on all workers.
        """
        self._reference[: change.numel()] += change

    def settle(self, vector: Tensor) -> None:
        """Add to a vector, which is averaged exactly, what rounding has kept back; here nothing is left of it.

        Args:
            vector: what this worker has now (w̄, after an averaging), shape (d,), changed in place.
        """
        vector += self._error[: self._numel]
        own = slice(self._rank * self._shard, min((self._rank + 1) * self._shard, self._numel))
        vector[own] += self._workers * self._owned_error[: max(0, own.stop - own.start)]
        self._error.zero_()
        self._owned_error.zero_()

    def _encode(self, shard: Tensor) -> Tensor:
        return shard.to(torch.bfloat16).view(torch.uint8) if self._rounds else _QUANTIZER.encode(shard)

    def _decode(self, payload: Tensor) -> Tensor:
        if self._rounds:
            return payload.view(torch.bfloat16).to(self._reference.dtype)
        return _QUANTIZER.decode(payload, self._shard, self._reference.dtype)
