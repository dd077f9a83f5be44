"""QSGD as a Lightning strategy: all workers average their gradients, sent in a few bits per element (arXiv 1610.02132)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_not_negative
from lightning_gossip.algorithm.compression.qsgd import Norm, Quantizer
from lightning_gossip.algorithm.compression.quantized_mean import QuantizedMean, Said, Status
from lightning_gossip.algorithm.tensors.flat import FlatModel
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.fit.lockstep_gather import Gatherer, GatherWithGradients, Turn, announce, next_turn
from lightning_gossip.strategies.lightning.replicated_processes import ReplicatedProcesses
from lightning_gossip.strategies.state.shared_tensors import Place, SharedModel
from lightning_gossip.strategies.synchronous import SynchronousAlgorithm
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step


@clear_arguments
class QSGDStrategy(DecentralizedStrategy, ReplicatedProcesses):
    """All-reduce SGD with quantized gradients: each worker rounds its gradient at random, unbiased, and gathers everybody's.

    Works on the CPU too, where Lightning leaves out DDP's communication hooks without saying so.

    Args:
        bits, levels, bucket_size, norm: see :class:`~lightning_gossip.algorithm.compression.qsgd.Quantizer`.
        seed: of the rounding.
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.

    Example::

        Trainer(strategy=QSGDStrategy(bits=8), devices=4)
    """

    name = "qsgd"
    shares_work: ClassVar[bool] = False

    def __init__(
        self,
        *,
        bits: int = 4,
        levels: int | None = None,
        bucket_size: int = 512,
        norm: Norm = "max",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_not_negative("seed", seed)
        self.quantizer = Quantizer(bits=bits, levels=levels, bucket_size=bucket_size, norm=norm)
        self.seed = seed

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return QuantizedAllReduce(self, timeline)


class _Gradients:
    """The gradients of some parameters, the same on all workers, as one vector.

    Args:
        places: of the parameters.
        device: of the vector.
    """

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        self.places = list(places)
        self._device = device
        self._present: list[Tensor] = []
        self._vector = FlatModel([place.real for place in self.places], device=device)

    @property
    def flat(self) -> Tensor:
        """The gradients as one flat vector."""
        return self._vector.flat

    def read(self) -> Tensor:
        """The vector ← the gradients, 0 where there is none.

        Returns:
            Which there are, uint8, shape (parameters,).
        """
        parameters = [place.tensor for place in self.places]
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            raise ConfigurationError(
                "QSGD quantizes dense gradients, and a layer of the model makes sparse ones. Use Embedding(sparse=False)."
            )
        self._present = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        self._vector.read(_real(self._present))
        return torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._device)

    def write(self, anywhere: Sequence[bool]) -> None:
        """Write the vector into the gradients of the parameters that have one on some worker."""
        self._vector.write(_real(self._present))
        for place, gradient, is_present in zip(self.places, self._present, anywhere, strict=True):
            if is_present and place.tensor.grad is None:  # used by other workers only
                place.tensor.grad = gradient

    def clear(self) -> Tensor:
        """The vector ← 0, of a worker that makes no more steps; returns as :meth:`read`."""
        self.flat.zero_()
        return torch.zeros(len(self.places), dtype=torch.uint8, device=self._device)


class QuantizedAllReduce(SynchronousAlgorithm, Gatherer):
    """One worker's gradients, quantized and averaged with everybody's, during one fit.

    Args:
        strategy: whose options.
        timeline: where waits are recorded.
    """

    def __init__(self, strategy: QSGDStrategy, timeline: Timeline) -> None:
        super().__init__(strategy.root_device, strategy.timeout_s, timeline)
        self._mean = QuantizedMean(strategy.quantizer, seed=strategy.seed, rank=strategy.global_rank, device=self._device)
        self._groups: list[_Gradients] = []  # of the shared parameters, and of those thawed in this session
        self._frozen: dict[str, Place] = {}  # of which a gradient may come all the same
        self._announces = False

    @override
    def open(self, model: SharedModel) -> None:
        super().open(model)
        self._groups = [_Gradients(model.shared_parameters, self._device)]
        self._frozen = {place.name: place for place in model.rest() if not place.is_buffer and place.has_mean}

    @override
    def reduce_gradients(self) -> None:
        if self._announces:
            self._next_turn(Turn(is_in_batch=True))
        self._reduce(arrived=False)

    @override
    def step(self, step: Step) -> None:
        """The models of all workers have made the same step."""

    @override
    def arrive(self) -> None:
        while True:  # the others may have gradients to average
            turn = self._next_turn(Turn(is_in_batch=False)) if self._announces else Turn(is_in_batch=True)
            if turn is None:
                return
            if turn.gathers:
                self.collectives.gather_bytes(torch.zeros(turn.gathers, dtype=torch.uint8, device=self._device))
            elif not self._reduce(arrived=True):
                return

    @override
    def gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor | None:
        if sync_grads and tensor.requires_grad:
            gathered: Tensor = GatherWithGradients.apply(self, tensor)
            return gathered
        return self.gather_in_batch(tensor)[0]

    @override
    def gather_in_batch(self, tensor: Tensor) -> tuple[Tensor, int]:
        if not self._announces:
            self._begin_to_announce()
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=self._device)
        payload = flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
        turns = announce(self.collectives, Turn(True, payload.numel()), self._device)
        next_turn(turns)
        everyones = self.collectives.gather_bytes(payload)
        present = [rank for rank, turn in enumerate(turns) if turn.is_in_batch]
        tensors = [everyones[rank].to(tensor.device).view(tensor.dtype).view(tensor.shape) for rank in present]
        return torch.stack(tensors), present.index(self.collectives.rank)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._mean.generator.get_state()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean.generator.set_state(state["generator"])

    def _reduce(self, *, arrived: bool) -> bool:
        """Average the gradients of all groups; returns whether anybody makes steps."""
        thawed = [] if arrived else [name for name, place in self._frozen.items() if place.tensor.grad is not None]
        said = self._average(self._groups[0], arrived=arrived, status=Status.THAWED if thawed else Status.IN_STEP)
        if said.any(Status.ANNOUNCES):
            return True  # the gradients come later
        if said.any(Status.THAWED):
            everyones = {name for names in self.collectives.gather(thawed) for name in names}
            self._model.learn([], with_gradient=sorted(everyones))
            joining = [self._frozen.pop(name) for name in list(self._frozen) if name in everyones]
            self._groups.append(_Gradients(joining, self._device))
        for group in self._groups[1:]:
            self._average(group, arrived=arrived, status=Status.IN_STEP)
        return not said.ended

    def _average(self, group: _Gradients, *, arrived: bool, status: Status) -> Said:
        """Replace gradients by the mean of the quantized ones of those that make steps; returns what all say of themselves."""
        present = group.clear() if arrived else group.read()
        if arrived or not bool(present.all()):
            status |= Status.ARRIVED if arrived else Status.PARTIAL
        said = self._replace_by_mean(group.flat, status)
        if said.any(Status.PARTIAL):
            present = torch.stack(self.collectives.gather_bytes(present)).amax(0)
        if not arrived:
            group.write(present.tolist())
        return said

    def _begin_to_announce(self) -> None:
        """The first gather of all steps comes where the others expect a gradient: tell those that have arrived."""
        self._replace_by_mean(self._groups[0].flat.zero_(), Status.ANNOUNCES)

    def _next_turn(self, mine: Turn) -> Turn | None:
        return next_turn(announce(self.collectives, mine, self._device))

    def _replace_by_mean(self, gradient: Tensor, status: Status) -> Said:
        """Replace a vector by the mean of the quantized ones of those that make steps; returns what all say of themselves."""
        message = self._mean.message(gradient, status | Status.CALLING if self._asks_for_sync else status)
        said = self._mean.mean(self.collectives.gather_bytes(message), out=gradient)
        self._sync_requested = self._sync_requested or said.any(Status.CALLING)
        self._announces = said.announces or self._announces
        return said


def _real(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
