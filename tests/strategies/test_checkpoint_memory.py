"""What a checkpoint needs of a device's memory: nothing, beside what the worker has anyway."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils._pytree import tree_leaves

from benchmarks.emulated_device import EmulatedDevice
from lightning_gossip import ADPSGDStrategy, Outer, PeriodicAveragingStrategy
from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.algorithm.slow_weights import OuterState
from lightning_gossip.runtime.adpsgd.cuda_replica import StagedCopies, staged_replica
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies import adpsgd
from lightning_gossip.strategies.state.checkpoint_contents import KEY, mean_optimizer_state
from lightning_gossip.transport.gloo_group import host_group
from tests.strategies.jobs import job, kill_myself, store, survivors
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer

HOST = torch.device("cpu")


class Alone(FixedWorkers):
    """The one worker of a group of one."""

    def gather(self, mine: object, kind: str = "values") -> list[object]:
        return [mine]


class OnDevice(Tensor):
    """A tensor in another memory than the host's: it can be copied from there, and no more."""

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="meta")  # type: ignore[no-any-return]

    def __init__(self, values: Tensor) -> None:
        self.values_there = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            return args[0].copy_(args[1].values_there)
        raise NotImplementedError(f"{func} makes something in the device's memory.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_mean_of_an_optimizers_state_is_made_in_host_memory(keeps: bool, dtype: torch.dtype) -> None:
    values = torch.arange(4.0, dtype=dtype)
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": OnDevice(values)}}, "param_groups": [{"params": [0]}]}
    mean = mean_optimizer_state(state, HOST, Alone(host_group(HashStore(), 0, 1, 10.0)), keeps=lambda: keeps)
    assert mean["param_groups"] == state["param_groups"]
    if keeps:
        found = mean["state"][0]["exp_avg"]
        assert found.device == HOST
        assert found.dtype == dtype
        assert torch.equal(found, values)
        assert mean["state"][0]["step"] == 3.0
    else:
        assert mean["state"] == {}


class Look(Callback):
    """What a rank puts into a checkpoint, and what it makes in the device's memory meanwhile, in bytes."""

    def __init__(self, device: EmulatedDevice, on_device: Callable[[], None]) -> None:
        self._device = device
        self._on_device = on_device
        self.made = self.states = self.tensors = 0

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        strategy = trainer.strategy
        save, dump = strategy.save_checkpoint, strategy.optimizer_state

        def dumped(optimizer: Any) -> Any:
            self._on_device()
            with self._counting():
                found = dump(optimizer)
            self.states += nbytes(found["state"])
            return found

        def saved(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            with self._counting():
                save(checkpoint, *args, **kwargs)
            self.tensors += nbytes(checkpoint[KEY]["tensors"])

        strategy.optimizer_state, strategy.save_checkpoint = dumped, saved

    @contextmanager
    def _counting(self) -> Iterator[None]:
        before = set(self._device.held)
        yield
        self._device.synchronize()
        self.made += sum(tensor.nbytes for key, tensor in self._device.held.items() if key not in before)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            for value in state.values():
                if value.dim():  # the counts of steps are on the host
                    self._device.tensor(value)


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


STRATEGIES: dict[str, Any] = {
    "adpsgd": lambda: ADPSGDStrategy(),
    "noloco": lambda: ADPSGDStrategy(local_steps=4, outer=Outer(), dense_share=0.0),
    "noloco, evaluate": lambda: ADPSGDStrategy(local_steps=4, outer=Outer(), dense_share=0.0, at_rendezvous="evaluate"),
    "diloco": lambda: PeriodicAveragingStrategy(period=4, outer=Outer()),
}


def _saves(name: str, path: str) -> tuple[int, int, int]:
    device = EmulatedDevice()
    model = Net(lambda model: torch.optim.AdamW(model.parameters()))
    for tensor in (*model.parameters(), *model.buffers()):
        device.tensor(tensor)

    def replica_of(tensors: Sequence[Tensor], **options: Any) -> PublishedModel:
        return staged_replica(tensors, StagedCopies(tensors, device.streams()), **options)

    adpsgd.replica_of = replica_of
    make = OuterState.__init__
    outer: list[Tensor] = []

    def made(self: OuterState, names: Sequence[str], x: Sequence[Tensor]) -> None:
        make(self, names, x)
        outer.extend((self.slow, self.velocity))
        if name != "diloco":  # whose means are in other memory of the device's
            on_device()

    def on_device() -> None:
        for vector in outer:
            device.tensor(vector)

    OuterState.__init__ = made  # type: ignore[method-assign]
    look = Look(device, on_device)
    t = trainer(strategy=STRATEGIES[name](), callbacks=[look, ModelCheckpoint(path)], max_epochs=1)
    with device:
        t.fit(model, loader(96, 8))
        device.synchronize()
    device.close()
    return look.made, look.states, look.tensors


@pytest.mark.processes
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_checkpoint_needs_none_of_a_devices_memory_and_who_does_not_write_it_keeps_nothing(name: str, tmp_path: Path) -> None:
    size = nbytes(list(Net().parameters()))
    states, tensors = 2 * size + 4 * len(list(Net().parameters())), (0 if name == "adpsgd" else 2 * size)
    writer, next_one, other = launch(_saves, name, str(tmp_path), workers=3)
    assert writer == (0, states, tensors)
    assert next_one == (0, 0 if name == "diloco" else states, 0)  # which would write in its place
    assert other == (0, 0, 0)
    (written,) = tmp_path.iterdir()
    found = torch.load(written, weights_only=False)
    assert nbytes(found["optimizer_states"][0]["state"]) == states
    assert all(leaf.isfinite().all() for leaf in tree_leaves(found[KEY]["tensors"]))


def _dies_in_turn(address: str, path: str) -> tuple[float, int]:
    """Ranks 0 and 1, the ones that have the means, are killed when they write the checkpoint of the second epoch."""
    from lightning_gossip.strategies.state import atomic_checkpoint_io

    save, saves = atomic_checkpoint_io._save, []

    def dies(checkpoint: dict[str, Any], file: Any) -> None:
        saves.append(checkpoint)
        if os.environ["RANK"] == "1" or len(saves) == 2:
            kill_myself()
        save(checkpoint, file)

    if os.environ["RANK"] in "01":
        atomic_checkpoint_io._save = dies
    saver = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
    strategy = ADPSGDStrategy(store=address, peer_timeout_s=5.0, local_steps=4, outer=Outer(), dense_share=0.0)
    t = trainer(strategy=strategy, callbacks=[saver], max_epochs=2)
    t.fit(Net(lambda model: torch.optim.AdamW(model.parameters())), loader(240, 8))
    moment = sum(state["exp_avg"].abs().sum().item() for state in t.optimizers[0].state.values())
    return moment, t.world_size


@pytest.mark.processes
@pytest.mark.slow
def test_where_all_fail_that_had_the_means_they_are_made_again_of_those_that_are_left(tmp_path: Path) -> None:
    with store() as address, job(_dies_in_turn, address, str(tmp_path), workers=4) as running:
        running.start_all()
        results = survivors(running.outcomes(timeout_s=120.0))
    assert [size for _, size in results] == [2, 2]
    for epoch in range(2):
        found = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=False)
        state = found["optimizer_states"][0]["state"]
        assert len(state) == len(list(Net().parameters()))
        assert all(of["exp_avg"].isfinite().all() and of["exp_avg"].any() for of in state.values())
        assert {key.partition("/")[0] for key in found[KEY]["tensors"]} == {"slow", "velocity"}
