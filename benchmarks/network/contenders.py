"""Who is compared. A new contender is one row of CONTENDERS, and a loop if it has no Lightning strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.harness import torchft_manager
from lightning_gossip import ADPSGDStrategy, DPSGDStrategy, PeriodicAveragingStrategy, QSGDStrategy
from lightning_gossip.algorithm import AdaptivePeriod

if TYPE_CHECKING:
    from benchmarks.network.worker import Training

PERIOD = 8  # of all that average models now and then
_LIGHTHOUSE_PORT = 29510
_DEADLINE = timedelta(minutes=5)
_POWER_SGD_RANK = 4
_POWER_SGD_START = 2  # the earliest that its error feedback allows; the default of 1,000 steps would never come
_BUCKET_MB = 4  # one layer of the perceptron
_ONE_BUCKET_MB = 1000
"""PowerSGD's hook makes its later all-reduces when earlier ones have ended, on Gloo's threads: with two buckets at a time the
workers make them in different orders, and Gloo ends the process."""


class HookedDDPStrategy(DDPStrategy):
    """DDP with a communication hook on the CPU, where Lightning leaves hooks out without saying so.

    Args:
        hook: for ``register_comm_hook``.
        state: makes its state, or is None.
        options: of DDPStrategy.
    """

    def __init__(self, hook: Callable[..., Any], state: Callable[[], object] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._hook, self._state = hook, state

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._state() if self._state else None, self._hook)


def _power_sgd_state() -> object:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=_POWER_SGD_RANK, start_powerSGD_iter=_POWER_SGD_START
    )


def torch_periodic(training: Training) -> None:
    """torch's own model averaging."""
    net = training.net
    optimizer = training.optimizer(list(net.parameters()))
    schedule = training.schedule(optimizer)
    averager = PeriodicModelAverager(period=PERIOD)
    for batch in training.loader:
        optimizer.zero_grad()
        training.loss(net, batch).backward()
        optimizer.step()
        averager.average_parameters(net.parameters())
        schedule.step()
        training.end_step()
    for value in net.state_dict().values():  # what is evaluated and saved is the mean
        if value.is_floating_point():
            dist.all_reduce(value)
            value.div_(dist.get_world_size())


def decent_dp(training: Training) -> None:
    """Pairs on a ring in lock-step; average and optimizer run in hooks of the backward pass."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.disable("decent_dp")
    model: nn.Module = DecentralizedDataParallel(
        training.net,
        optim_fn=lambda named: training.optimizer([p for _, p in named]),
        lr_scheduler_fn=training.schedule,
        topology="ring",
        sync_buffer_in_global_avg=True,
        _local_world_size=1,
    )
    for batch in training.loader:
        training.loss(model, batch).backward()
        training.end_step()
    model.global_avg(will_revert=False)  # type: ignore[operator]


def torchft_local_sgd(training: Training) -> None:
    """torchft's LocalSGD: each worker is a replica group of one, and every averaging begins with a quorum."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]
    from torchft.local_sgd import LocalSGD  # type: ignore[import-not-found]

    rank, workers = dist.get_rank(), dist.get_world_size()
    address = f"{os.environ['MASTER_ADDR']}:{_LIGHTHOUSE_PORT}"
    lighthouse = LighthouseServer(address, workers, join_timeout_ms=100) if rank == 0 else None
    dist.barrier()
    net = training.net
    optimizer = training.optimizer(list(net.parameters()))
    schedule = training.schedule(optimizer)
    options = {"use_async_quorum": False, "quorum_timeout": _DEADLINE, "lighthouse_addr": f"http://{address}"}
    options["init_sync"] = False  # the models are equal
    with (
        torchft_manager(net.load_state_dict, net.state_dict, min_replica_size=workers, timeout=_DEADLINE, **options) as manager,
        LocalSGD(manager, net, optimizer, sync_every=PERIOD) as averager,
    ):
        for batch in training.loader:
            optimizer.zero_grad()
            training.loss(net, batch).backward()
            optimizer.step()
            schedule.step()
            training.end_step()
        averager.sync()
        dist.barrier()
    if lighthouse is not None:
        lighthouse.shutdown()


@dataclass(frozen=True)
class Contender:
    """One row.

    Args:
        label: in tables and figures.
        colour: in figures; of the eight of Okabe and Ito, which colour-blind readers can tell apart.
        marker: in figures, so that no line needs its colour.
        strategy: makes its Lightning strategy.
        loop: or its plain loop.
        needs: module that must be installed.
        in_backward: share of the emulated computing that happens in the backward pass, layer by layer.
    """

    label: str
    colour: str
    marker: str
    strategy: Callable[[], Strategy] | None = None
    loop: Callable[[Training], None] | None = None
    needs: str | None = None
    in_backward: float = 0.0

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, in one sentence; None if it can."""
        if self.needs is None or find_spec(self.needs) is not None:
            return None
        return f"{self.label} is left out: there is no module {self.needs}; pip install lightning-gossip[bench] brings it."


REFERENCE = "ddp"
YARDSTICK = "no_exchanges"

# Okabe and Ito's palette, a family a colour
_GREEN, _BLUE, _SKY, _ORANGE = "#009E73", "#0072B2", "#56B4E9", "#E69F00"
_VERMILION, _PURPLE, _GREY = "#D55E00", "#CC79A7", "#555555"

CONTENDERS = {
    "adpsgd": Contender("AD-PSGD", _GREEN, "o", strategy=ADPSGDStrategy),
    "adpsgd_int8": Contender("AD-PSGD, int8", _GREEN, "s", strategy=lambda: ADPSGDStrategy(wire="int8")),
    "adpsgd_fast_links": Contender(
        "AD-PSGD, fast links", _GREEN, "^", strategy=lambda: ADPSGDStrategy(partner_choice="fast_links")
    ),
    "no_exchanges": Contender("no exchanges", _GREY, "x", strategy=lambda: ADPSGDStrategy(exchanges_per_step=0)),
    "adaptive_averaging": Contender(
        "adaptive averaging",
        _BLUE,
        "o",
        strategy=lambda: PeriodicAveragingStrategy(period=AdaptivePeriod(warmup_epochs=0)),  # the run is one epoch
    ),
    "periodic_averaging": Contender(
        f"averaging every {PERIOD}", _SKY, "o", strategy=lambda: PeriodicAveragingStrategy(period=PERIOD)
    ),
    "dpsgd": Contender("D-PSGD", _BLUE, "D", strategy=DPSGDStrategy),
    "qsgd": Contender("QSGD, 4 bits", _SKY, "D", strategy=QSGDStrategy),
    "ddp": Contender("Lightning DDP", _VERMILION, "o", strategy=DDPStrategy),
    "ddp_overlap": Contender(
        "DDP, overlapped",
        _VERMILION,
        "s",
        strategy=lambda: DDPStrategy(bucket_cap_mb=_BUCKET_MB),
        in_backward=0.5,
    ),
    "ddp_bf16": Contender("DDP, bf16 hook", _ORANGE, "o", strategy=lambda: HookedDDPStrategy(default_hooks.bf16_compress_hook)),
    "ddp_powersgd": Contender(
        "DDP, PowerSGD hook",
        _ORANGE,
        "s",
        strategy=lambda: HookedDDPStrategy(powerSGD_hook.powerSGD_hook, _power_sgd_state, bucket_cap_mb=_ONE_BUCKET_MB),
    ),
    "torch_periodic": Contender(f"torch's averager, {PERIOD}", _PURPLE, "o", loop=torch_periodic),
    "torchft_local_sgd": Contender(f"torchft LocalSGD, {PERIOD}", _PURPLE, "s", loop=torchft_local_sgd, needs="torchft"),
    "decent_dp": Contender("Decent-DP", _PURPLE, "^", loop=decent_dp, needs="decent_dp"),
}
