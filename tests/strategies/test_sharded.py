"""Sharded islands: FSDP2 and tensor parallelism inside an island, each rank's shards gossiped with other islands."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from lightning_gossip import ConfigurationError, Outer, ShardedADPSGDStrategy
from tests.strategies.jobs import job, store, survivors
from tests.strategies.launch import launch
from tests.strategies.models import OPTIMIZERS, Net, RemembersLosses, loader, samples, trainer
from tests.strategies.test_islands import Back, Killed

processes = pytest.mark.processes
SAMPLES = 203  # 26 batches of 8: six groups of four, and one cut anew


def sharded(data: int = 2, tensor: int = 1, **options: Any) -> ShardedADPSGDStrategy:
    return ShardedADPSGDStrategy(data_parallel_size=data, tensor_parallel_size=tensor, timeout=60.0, **options)


class ShardedNet(Net):
    """As a user writes it for ModelParallelStrategy."""

    def configure_model(self) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network:  # type: ignore[union-attr]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


def vector(tensors: Iterable[Tensor]) -> Any:
    """In one, gathered inside the island, as numpy's: a process may end before the test has read a tensor of torch's."""
    gathered = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in gathered]).numpy().copy()


def whole(model: nn.Module) -> Any:
    """All parameters in one vector."""
    return vector(model.parameters())


def momentum_of(fit: Trainer, model: nn.Module) -> Any:
    """Of the first parameter."""
    return vector([fit.optimizers[0].state[next(iter(model.parameters()))]["momentum_buffer"]])


class Parted(Callback):
    """Gives each island a model of its own when the fit begins."""

    def __init__(self, size: int) -> None:
        self._size = size

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        generator = torch.Generator().manual_seed(trainer.global_rank // self._size)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
                parameter += noise
        self.model = whole(pl_module)


# -- training ----------------------------------------------------------------------------------------------------------------


def _train(folder: str, distributed: bool) -> Any:
    seed_everything(1)
    model, strategy = ShardedNet(), sharded(save_distributed_checkpoint=distributed)
    saver = ModelCheckpoint(dirpath=folder, filename="last", enable_version_counter=False)
    fit = trainer(strategy=strategy, callbacks=[saver])
    fit.fit(model, loader(SAMPLES), loader(50, shuffle=False))
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    buffers, momentum = vector(model.network.buffers()), momentum_of(fit, model)
    validated = fit.validate(model, loader(50, shuffle=False), verbose=False)[0]
    return {
        "seen": model.seen,
        "model": whole(model),
        "momentum": momentum,
        "buffers": buffers,
        "logged": {name: logged[name] for name in ("val_acc", "val_loss", "train_loss_epoch")},
        "validated": validated,
        "group": (dist.get_rank(), dist.get_world_size(), fit.global_rank, fit.world_size),
        "report": [(worker.rank, worker.steps, worker.samples) for worker in strategy.report.workers],
        "bytes": [(worker.exchanges, worker.bytes_sent) for worker in strategy.report.workers],
        "last": saver.best_model_path,
    }


def _load_plain(path: str, distributed: bool) -> Any:
    """The exit door: Lightning's own strategy goes on from the islands' checkpoint."""
    model = ShardedNet()
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed)
    fit = trainer(strategy=strategy, max_epochs=3, callbacks=[Keep()])
    fit.fit(model, loader(SAMPLES), ckpt_path=path)
    return Keep.model, Keep.momentum, fit.current_epoch


class Keep(Callback):
    """Keeps what a fit has loaded."""

    model: Any
    momentum: Any

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        Keep.model = whole(pl_module)
        Keep.momentum = momentum_of(trainer, pl_module) if next(pl_module.parameters()).requires_grad else None


def _resume(path: str, distributed: bool, data: int) -> Any:
    model = ShardedNet()
    fit = trainer(strategy=sharded(data, save_distributed_checkpoint=distributed), max_epochs=3, callbacks=[Keep()])
    fit.fit(model, loader(SAMPLES), ckpt_path=path)
    return Keep.model, Keep.momentum, fit.current_epoch


@processes
@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_islands_train_on_each_sample_once_and_write_one_model_that_others_load(tmp_path: Path, distributed: bool) -> None:
    ranks = launch(_train, str(tmp_path), distributed, workers=4, timeout_s=240.0)
    assert Counter(sample for rank in ranks for sample in rank["seen"]) == dict.fromkeys(range(SAMPLES), 2)
    assert [rank["group"] for rank in ranks] == [(rank % 2, 2, rank, 4) for rank in range(4)]  # FSDP2's group is the island
    for rank in ranks[1:]:
        for name in ("model", "buffers"):
            assert np.array_equal(rank[name], ranks[0][name])
        for name in ("logged", "validated", "report"):
            assert rank[name] == ranks[0][name]
    assert ranks[0]["logged"]["val_acc"] == pytest.approx(ranks[0]["validated"]["val_acc"])
    assert [island for island, *_ in ranks[0]["report"]] == [0, 1]
    assert sum(steps for _, steps, _ in ranks[0]["report"]) == 2 * 13
    numel = 8 * 16 + 16 + 2 * 16 + 16 * 2 + 2 + 2 * 2 * 16  # a rank sends its half, and its own averaged buffers
    for exchanges, sent in ranks[0]["bytes"]:
        assert exchanges > 0
        assert sent == pytest.approx(exchanges / 2 * numel * 4, rel=0.05)

    path = ranks[0]["last"]
    assert Path(path).is_dir() == distributed
    mean_momentum = (ranks[0]["momentum"] + ranks[2]["momentum"]) / 2
    for loaded, momentum, _epochs in launch(_load_plain, path, distributed, workers=2):
        assert np.array_equal(loaded, ranks[0]["model"])
        assert np.allclose(momentum, mean_momentum, atol=1e-7)
    for data, workers in () if distributed else ((1, 2), (2, 2), (1, 1)):
        for loaded, momentum, epochs in launch(_resume, path, distributed, data, workers=workers):
            assert np.array_equal(loaded, ranks[0]["model"])
            assert np.allclose(momentum, mean_momentum, atol=1e-7)
            assert epochs == 3


# -- one island is FSDP2 -----------------------------------------------------------------------------------------------------


class Losses(RemembersLosses, ShardedNet):
    pass


def _hashes(optimizer: str, clipped: bool) -> list[tuple[str, list[float]]]:
    found: list[tuple[str, list[float]]] = []
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2} if clipped else {}
    for strategy in (sharded(2), ModelParallelStrategy(2, 1, process_group_backend="gloo")):
        seed_everything(3)
        model = Losses(OPTIMIZERS[optimizer])
        data = samples(320 if clipped else 160)
        fit = trainer(strategy=strategy, max_epochs=2, use_distributed_sampler=False, **options)
        batches = DataLoader(data, 8, sampler=DistributedSampler(data, 2, fit.global_rank, shuffle=False))
        fit.fit(model, batches, loader(50, shuffle=False))
        assert fit.global_step == 20
        found.append((hashlib.sha256(whole(model).tobytes()).hexdigest(), model.losses))
    return found


@processes
@pytest.mark.parametrize(
    ("optimizer", "clipped"),
    [
        ("adamw", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("adamw", False), ("sgd", True), ("sgd", False)]),
    ],
)
def test_one_island_is_fsdp2_bit_for_bit(optimizer: str, clipped: bool) -> None:
    for ours, lightnings in launch(_hashes, optimizer, clipped, workers=2):
        assert len(ours[1]) == (40 if clipped else 20)
        assert ours == lightnings


# -- the mean ----------------------------------------------------------------------------------------------------------------


def _stand_still(tensor: int) -> Any:
    model = ShardedNet(lambda module: torch.optim.SGD(module.parameters(), lr=0.0), _network())
    parted = Parted(2)
    strategy = sharded(2 // tensor, tensor)
    fit = trainer(strategy=strategy, max_epochs=3, callbacks=[parted])
    fit.fit(model, loader(320))
    return parted.model, whole(model), strategy.report.consensus_distance, sum(w.exchanges for w in strategy.report.workers)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), nn.ReLU(), nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 2))


@processes
@pytest.mark.slow
def test_without_updates_gossip_keeps_the_mean_of_unlike_islands() -> None:
    """Of uneven shards, and of parameters of which a rank has nothing: Linear(3, 1)."""
    ranks = launch(_stand_still, 1, workers=4)
    begun = [ranks[0][0].astype(float), ranks[2][0].astype(float)]
    assert not np.array_equal(*begun)
    mean = sum(begun) / 2
    for _, ended, _, exchanges in ranks:
        assert exchanges > 0
        assert np.allclose(ended, mean, rtol=1e-6, atol=1e-6)


# -- tensor parallelism ------------------------------------------------------------------------------------------------------


class TwoDimensional(ShardedNet):
    """Columns, then rows; the bias of the second layer and BatchNorm are the same on all tensor-parallel ranks."""

    def configure_model(self) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return
        assert self.device_mesh is not None
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        network: Any = self.network
        parallelize_module(
            network, tensor, {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
        )
        if data.size() > 1:
            fully_shard(network, mesh=data)


def _locals(model: nn.Module) -> Any:
    """What this rank has of what its tensor-parallel mates have too, and nobody shards."""
    found = [*model.network.buffers()]  # type: ignore[union-attr]
    for name in ("1.weight", "1.bias", "3.bias"):
        parameter = model.network.get_parameter(name)  # type: ignore[union-attr]
        found.append(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in found]).numpy().copy()


class Boundaries(Callback):
    """Looks at each step boundary."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.seen.append(_locals(pl_module))


class NormOnly(TwoDimensional):
    """Trains nothing but BatchNorm's parameters: the second tensor-parallel rank owns nothing."""

    def configure_model(self) -> None:
        super().configure_model()
        self.network.requires_grad_(False)
        self.network[1].requires_grad_(True)  # type: ignore[index]


def _norm_only(folder: str, options: dict[str, Any]) -> Any:
    seed_everything(5)
    model, boundaries, saver = NormOnly(), Boundaries(), ModelCheckpoint(dirpath=folder, filename="last")
    strategy = sharded(1, 2, **options)
    fit = trainer(strategy=strategy, callbacks=[boundaries, saver], max_epochs=2)
    fit.fit(model, loader(SAMPLES))
    resumed = NormOnly()
    trainer(strategy=sharded(1, 2, **options), max_epochs=3, callbacks=[Keep()]).fit(
        resumed, loader(SAMPLES), ckpt_path=saver.best_model_path
    )
    return boundaries.seen, whole(model), [w.exchanges for w in strategy.report.workers], Keep.model, whole(resumed)


@processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"outer": Outer(0.7, 0.6), "local_steps": 2, "dense_share": 0.0}, {"a2cid2": True}],
    ids=["plain", "outer", "a2cid2"],
)
def test_a_tensor_parallel_rank_may_own_nothing_of_what_is_trained(tmp_path: Path, options: dict[str, Any]) -> None:
    ranks = launch(_norm_only, str(tmp_path), options, workers=4)
    for ours, mate in (ranks[:2], ranks[2:]):
        assert len(ours[0]) == len(mate[0]) > 0
        assert all(np.array_equal(*seen) for seen in zip(ours[0], mate[0], strict=True))
    assert not np.array_equal(ranks[0][0][0], ranks[0][0][-1])
    assert all(np.array_equal(rank[1], ranks[0][1]) for rank in ranks)
    assert all(exchanges > 0 for exchanges in ranks[0][2])
    for rank in ranks:
        assert np.array_equal(rank[3], ranks[0][1])
        assert np.array_equal(rank[4], ranks[0][4])
        assert not np.array_equal(rank[4], rank[3])


def _two_dimensional(data: int, tensor: int) -> Any:
    seed_everything(5)
    model, boundaries = TwoDimensional(), Boundaries()
    strategy = sharded(data, tensor)
    fit = trainer(strategy=strategy, callbacks=[boundaries], max_epochs=3)
    fit.fit(model, loader(SAMPLES), loader(50, shuffle=False))
    exchanges = sum(worker.exchanges for worker in strategy.report.workers)
    return model.seen, boundaries.seen, whole(model), exchanges, float(fit.callback_metrics["val_acc"])


@processes
@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
def test_what_tensor_parallel_ranks_have_in_common_has_one_owner_and_stays_common(data: int, tensor: int) -> None:
    ranks = launch(_two_dimensional, data, tensor, workers=2 * data * tensor, timeout_s=240.0)
    for first in range(0, len(ranks), tensor):  # mates along the tensor-parallel dimension
        for mate in ranks[first + 1 : first + tensor]:
            assert mate[0] == ranks[first][0]  # the same batches
            assert len(mate[1]) == len(ranks[first][1])
            for theirs, ours in zip(mate[1], ranks[first][1], strict=True):
                assert np.array_equal(theirs, ours)
    assert Counter(s for rank in ranks[::tensor] for s in rank[0]) == dict.fromkeys(range(SAMPLES), 3)
    assert ranks[0][3] > 0
    assert all(np.array_equal(rank[2], ranks[0][2]) and rank[4] > 0.6 for rank in ranks)


# -- forward passes without a backward pass ----------------------------------------------------------------------------------


class FirstLosses(ShardedNet):
    """Remembers the loss of the same batch at the first step of each epoch."""

    def configure_model(self) -> None:
        """All in the root module, which keeps full copies after a forward pass."""
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            assert self.device_mesh is not None
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def on_train_epoch_start(self) -> None:
        self.fresh = True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Leaves an event that the next gather would wait for, and for nothing else; a stand-in of which it would choke."""
        super().optimizer_step(*args, **kwargs)
        self.network.set_post_optim_event(object())  # type: ignore[operator]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fresh:
            self.fresh = False
            self.firsts = [*getattr(self, "firsts", []), float(self.loss(next(iter(loader(64, 64, shuffle=False)))).detach())]
        return super().training_step(batch, batch_idx)


class Mixed(ShardedNet):
    """All in the root module, whose full copies are of another type than its shards."""

    def __init__(self) -> None:
        super().__init__(network=_network())

    def configure_model(self) -> None:
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            assert self.device_mesh is not None
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


class Compared(Callback):
    """Asks what a joiner and a member are compared by, after a forward pass on one rank only; then all start equal anew."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.loss(next(iter(loader(8))))
        self.types = {str(parameter.dtype) for parameter in pl_module.parameters()}
        strategy: Any = trainer.strategy
        strategy.start_equal()
        if trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.loss(next(iter(loader(8))))
        self.fingerprint = strategy.shared_model(pl_module, ()).fingerprint()


def _compared() -> Any:
    compared = Compared()
    trainer(strategy=sharded(1), max_epochs=1, callbacks=[compared]).fit(Mixed(), loader(32))
    return compared.types, compared.fingerprint


@processes
def test_full_copies_of_another_type_do_not_make_another_model() -> None:
    """A joiner has them after its sanity check, and a member has none after a checkpoint."""
    (shards, member), (full, joiner) = launch(_compared)
    assert (shards, full) == ({"torch.float32"}, {"torch.bfloat16"})
    assert member == joiner


def _put_back() -> Any:
    model = FirstLosses(lambda module: torch.optim.SGD(module.parameters(), lr=0.0), _network())
    strategy = sharded(exchanges_per_step=0.0, at_rendezvous="evaluate")
    trainer(strategy=strategy, max_epochs=3, callbacks=[Parted(2)]).fit(model, loader(64), loader(50, shuffle=False))
    return model.firsts


@processes
@pytest.mark.slow
def test_full_copies_that_a_validation_leaves_do_not_hide_what_is_written_to_shards() -> None:
    """The mean is validated, then each island's own model put back: the next step has to see that one."""
    losses = launch(_put_back, workers=4)
    assert losses[0] != losses[2]
    assert all(len(set(of_rank)) == 1 for of_rank in losses)


# -- an island that dies, and comes back ---------------------------------------------------------------------------------------


def _until_both_are_back(address: str, folder: str, mixed: bool) -> Any:
    seed_everything(1)
    model, strategy = Mixed() if mixed else ShardedNet(), sharded(store=address, peer_timeout_s=5.0)
    saver = ModelCheckpoint(dirpath=folder, filename="last", enable_version_counter=False)
    fit = trainer(strategy=strategy, callbacks=[Back(), Killed(3), saver], max_epochs=2000, num_sanity_val_steps=2)
    fit.fit(model, loader(SAMPLES), loader(50, shuffle=False))
    return {
        "rank": fit.global_rank,
        "model": whole(model),
        "momentum": momentum_of(fit, model),
        "world": fit.world_size,
        "epoch": fit.current_epoch,
        "island": (dist.get_rank(), dist.get_world_size()),
        "exchanges": [worker.exchanges for worker in strategy.report.workers],
    }


@processes
@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "float32 and bfloat16"])
def test_an_island_dies_with_one_of_its_ranks_and_comes_back_with_the_shards_of_another(tmp_path: Path, mixed: bool) -> None:
    with store() as address, job(_until_both_are_back, address, str(tmp_path), mixed, workers=4) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pid) for pid in pids[2:]], timeout=120)
        running.start(2)
        running.start(3)
        found = survivors(running.outcomes(timeout_s=240.0))
    assert sorted(outcome["rank"] for outcome in found) == [0, 1, 2, 3]
    for outcome in found:
        assert outcome["world"] == 4
        assert outcome["island"] == (outcome["rank"] % 2, 2)
        assert np.array_equal(outcome["model"], found[0]["model"])
        assert outcome["epoch"] == found[0]["epoch"]
        assert len(outcome["exchanges"]) == 2
        assert np.abs(outcome["momentum"]).sum() > 0


# -- the loss of one group ---------------------------------------------------------------------------------------------------


class Digits(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    configure_model = ShardedNet.configure_model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self)


def _digits(optimizer: str, seed: int, data_parallel: int) -> float:
    seed_everything(seed)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    train, held_out = random_split(data, [1400, 397], torch.Generator().manual_seed(0))
    fit = trainer(strategy=sharded(data_parallel), max_epochs=15)
    fit.fit(Digits(optimizer), DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=64))
    return float(fit.callback_metrics["val_loss"])


@processes
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_islands_of_two_reach_the_loss_of_one_group(optimizer: str) -> None:
    losses = {k: [launch(_digits, optimizer, s, k, workers=4, timeout_s=240.0)[0] for s in range(3)] for k in (2, 4)}
    print(optimizer, losses)
    assert np.mean(losses[2]) < np.mean(losses[4]) + 0.03, losses  # differences below .02 mean nothing with three seeds


# -- what is refused ---------------------------------------------------------------------------------------------------------


def _refused(strategy: Callable[[], Any], model: Callable[[], Any], **options: Any) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        trainer(strategy=strategy(), **{"devices": 2, **options}).fit(model(), loader(64))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("words", "strategy", "model", "options"),
    [
        ("needs the hook configure_model in Net", sharded, Net, {}),
        ("do not divide the 3 ranks of the job. Choose sizes whose product does: 1, 3", sharded, ShardedNet, {"devices": 3}),
        ("no multiple of tensor_parallel_size=2", lambda: sharded("auto", 2), ShardedNet, {"devices": 3}),  # type: ignore[arg-type]
        ("EMAWeightAveraging keeps a second model", sharded, ShardedNet, {"callbacks": [EMAWeightAveraging()]}),
        ("start_method='spawn' is not possible", lambda: "adpsgd_sharded_spawn", ShardedNet, {}),
        ("start_method='fork' is not possible", lambda: "adpsgd_sharded_notebook", ShardedNet, {}),
        ("data_parallel_size=0", lambda: sharded(0), ShardedNet, {}),
        ("has no argument 'island'", lambda: sharded(island=2), ShardedNet, {}),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(
    words: str, strategy: Callable[[], Any], model: Callable[[], Any], options: dict[str, Any]
) -> None:
    assert words in _refused(strategy, model, **options)


def test_half_precision_with_a_scaler_is_refused_also_where_the_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = trainer(strategy="adpsgd_sharded", devices=2)
    monkeypatch.setattr(fit.precision_plugin, "precision", "16-mixed")  # which Lightning takes back without a GPU
    with pytest.raises(ConfigurationError, match="precision='16-mixed' does not work with FSDP2"):
        fit.fit(ShardedNet(), loader(64))


class Quantized(torch.Tensor):
    """Stands for a tensor that holds its values otherwise, as float8 does."""


def _unfit() -> list[str]:
    """What is refused of models that a configure_model may make."""

    def of(change: Callable[[Any], None]) -> str:
        class Unfit(Net):
            def configure_model(self) -> None:
                change(self)

        return _refused(lambda: sharded(2), Unfit)

    def other_mesh(module: Any) -> None:
        fully_shard(module.network, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards")))

    def half(module: Any) -> None:
        fully_shard(module.network[0], mesh=module.device_mesh["data_parallel"])

    def partial(module: Any) -> None:
        fully_shard(module.network, mesh=module.device_mesh["data_parallel"])
        mesh = module.device_mesh["data_parallel"]
        module.register_parameter(
            "extra", nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False), requires_grad=False)
        )

    def has(extra: torch.Tensor) -> Callable[[Any], None]:
        def change(module: Any) -> None:
            fully_shard(module.network, mesh=module.device_mesh["data_parallel"])
            module.register_parameter("extra", nn.Parameter(extra, requires_grad=False))

        return change

    def fsdp1(module: Any) -> None:
        module.network = FullyShardedDataParallel(module.network, device_id=torch.device("cpu"))

    subclass, complex_values = has(torch.ones(2).as_subclass(Quantized)), has(torch.ones(2, dtype=torch.complex64))
    return [of(half), of(partial), of(other_mesh), of(subclass), of(complex_values), of(fsdp1)]


@processes
def test_parameters_without_one_owner_are_refused_by_name() -> None:
    for half, partial, other_mesh, subclass, complex_values, fsdp1 in launch(_unfit, workers=2):
        assert "The parameter network.1.weight is whole on each of the 2 data-parallel ranks" in half
        assert "The parameter extra has a Partial placement" in partial
        assert "lies on another device mesh" in other_mesh
        assert "The parameter extra is of the tensor subclass Quantized" in subclass
        assert "The parameter extra is of type torch.complex64, which islands do not average yet" in complex_values
        assert "FSDP1" in fsdp1
