"""QSGD as a Lightning strategy: all workers average their gradients, sent in a few bits per element (arXiv 1610.02132)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.algorithm.flat import FlatModel
from lightning_gossip.algorithm.quantize import Quantizer
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.strategies.algorithm import Algorithm, Step
from lightning_gossip.strategies.decentralized import DecentralizedStrategy
from lightning_gossip.strategies.in_step import Gatherer, GatherWithGradients, Turn, announce, next_turn
from lightning_gossip.strategies.lockstep import LockstepAlgorithm
from lightning_gossip.strategies.options import check_number

# bits of the byte after the gradient: the sender makes no more steps; it asks for a rendezvous; it has no gradient yet, and
# from here on everything is announced
_ARRIVED, _CALLING, _ANNOUNCES = 1, 2, 4


class QSGDStrategy(DecentralizedStrategy):
    """All-reduce SGD with quantized gradients: each worker rounds its gradient at random, unbiased, and gathers everybody's.

    Works on the CPU too, where Lightning leaves out DDP's communication hooks without saying so.

    Args:
        bits, levels, bucket_size, norm: see :class:`~lightning_gossip.algorithm.quantize.Quantizer`.
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
        norm: Literal["max", "l2"] = "max",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_number("seed", seed)
        self.quantizer = Quantizer(bits=bits, levels=levels, bucket_size=bucket_size, norm=norm)
        self.seed = seed

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return QuantizedAllReduce(self, timeline)


class QuantizedAllReduce(LockstepAlgorithm, Gatherer):
    """One worker's gradients, quantized and averaged with everybody's, during one fit.

    Args:
        strategy: whose options.
        timeline: where waits are recorded.
    """

    def __init__(self, strategy: QSGDStrategy, timeline: Timeline) -> None:
        super().__init__(strategy.root_device, strategy.timeout_s, timeline)
        self._quantizer = strategy.quantizer
        self._generator = torch.Generator(self._device).manual_seed(strategy.seed + 1_000_003 * strategy.global_rank)
        self._parameters: list[nn.Parameter] = []
        self._gradient = FlatModel([])
        self._announces = False

    @override
    def open(self, model: nn.Module) -> None:
        super().open(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradient = FlatModel(_real(self._parameters), device=self._device)

    @override
    def reduce_gradients(self) -> None:
        present = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in self._parameters
        ]
        if any(gradient.is_sparse for gradient in present):
            raise ConfigurationError(
                "QSGD quantizes dense gradients, and a layer of the model makes sparse ones. Use Embedding(sparse=False)."
            )
        if self._announces:
            self._next_turn(Turn(makes_steps=True))
        self._average(self._gradient.read(_real(present)), arrived=False)
        self._gradient.write(_real(present))
        for parameter, gradient in zip(self._parameters, present, strict=True):
            if parameter.grad is None and gradient.any():  # used by other workers only
                parameter.grad = gradient

    @override
    def step(self, step: Step) -> None:
        """The models of all workers have made the same step."""

    @override
    def arrive(self) -> None:
        while True:  # the others may have gradients to average
            self._gradient.flat.zero_()
            turn = self._next_turn(Turn(makes_steps=False)) if self._announces else Turn(makes_steps=True)
            if turn is None:
                return
            if turn.gathers:
                self.collectives.gather_bytes(torch.zeros(turn.gathers, dtype=torch.uint8, device=self._device))
            elif not self._average(self._gradient.flat, arrived=True):
                return

    @override
    def gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor | None:
        if sync_grads and tensor.requires_grad:
            gathered: Tensor = GatherWithGradients.apply(self, tensor)
            return gathered
        return self.gather_in_step(tensor)[0]

    @override
    def gather_in_step(self, tensor: Tensor) -> tuple[Tensor, int]:
        if not self._announces:
            self._begin_to_announce()
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=self._device)
        payload = flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
        turns = announce(self.collectives, Turn(True, payload.numel()), self._device)
        next_turn(turns)
        everyones = self.collectives.gather_bytes(payload)
        present = [rank for rank, turn in enumerate(turns) if turn.makes_steps]
        tensors = [everyones[rank].to(tensor.device).view(tensor.dtype).view(tensor.shape) for rank in present]
        return torch.stack(tensors), present.index(self.collectives.rank)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])

    def _next_turn(self, mine: Turn) -> Turn | None:
        return next_turn(announce(self.collectives, mine, self._device))

    def _begin_to_announce(self) -> None:
        """The first gather of all steps comes where the others expect a gradient: tell those that have arrived."""
        self._average(self._gradient.flat.zero_(), arrived=False, announces=True)

    def _average(self, gradient: Tensor, *, arrived: bool, announces: bool = False) -> bool:
        """Replace a gradient by the mean of the quantized ones of those that make steps; returns whether there are any."""
        status = (_ARRIVED if arrived else 0) | (_CALLING if self._asks_for_meeting else 0) | (_ANNOUNCES if announces else 0)
        payload = self._quantizer.encode(gradient, self._generator)
        payload = torch.cat([payload, payload.new_tensor([status])])
        gradient.zero_()
        contributors = 0
        everyones = self.collectives.gather_bytes(payload)
        begin = {bool(int(theirs[-1]) & _ANNOUNCES) for theirs in everyones if not int(theirs[-1]) & _ARRIVED}
        if len(begin) > 1:
            raise ConfigurationError(
                "Some workers call all_gather in this training step and some do not. Every rank has to gather equally often."
            )
        self._announces = self._announces or begin == {True}
        for theirs in everyones:
            status = int(theirs[-1])
            self._meeting_called = self._meeting_called or bool(status & _CALLING)
            if not status & _ARRIVED:
                self._quantizer.decode_add(theirs[:-1], gradient)
                contributors += 1
        gradient.div_(max(1, contributors))
        return contributors > 0


def _real(tensors: list[Any]) -> list[Tensor]:
    return [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
