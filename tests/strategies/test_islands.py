"""Islands: ranks that train together as one worker, and gossip part by part with other islands."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from lightning_gossip import (
    AdaptivePeriod,
    ADPSGDStrategy,
    APSGDStrategy,
    ConfigurationError,
    DPSGDStrategy,
    EAMSGDStrategy,
    PeriodicAveragingStrategy,
    QSGDStrategy,
)
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.strategies.lightning.fault_tolerance import Survival
from lightning_gossip.strategies.lightning.launchers import PatientObserver
from lightning_gossip.strategies.lightning.worker_processes import BatchesOfRank
from tests.runtime.cluster import eventually
from tests.strategies.jobs import job, store, survivors
from tests.strategies.launch import launch
from tests.strategies.models import OPTIMIZERS, Net, RemembersLosses, flat, loader, samples, trainer

processes = pytest.mark.processes
MANY = 403
SAMPLES = 203  # 26 batches of 8: six groups of four, and one cut anew


def islands(island: int = 2, **options: Any) -> ADPSGDStrategy:
    return ADPSGDStrategy(island=island, timeout=60.0, **options)


class Parted(Callback):
    """Gives each island a model of its own when the fit begins."""

    def __init__(self, island: int) -> None:
        self._island = island

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        generator = torch.Generator().manual_seed(trainer.global_rank // self._island)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        self.model = flat(pl_module).clone()


# -- training ----------------------------------------------------------------------------------------------------------------


def _train(folder: str) -> Any:
    seed_everything(1)
    model, strategy = Net(), islands()
    saver = ModelCheckpoint(dirpath=folder, filename="last")
    fit = trainer(strategy=strategy, callbacks=[saver])
    fit.fit(model, loader(SAMPLES), loader(50, shuffle=False))
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    validated = fit.validate(model, loader(50, shuffle=False), verbose=False)[0]
    return {
        "seen": model.seen,
        "model": flat(model).tolist(),
        "logged": {name: logged[name] for name in ("val_acc", "val_loss", "train_loss_epoch")},
        "validated": validated,
        "group": (dist.get_rank(), dist.get_world_size(), fit.global_rank, fit.world_size),
        "report": [(worker.rank, worker.steps, worker.samples) for worker in strategy.report.workers],
        "steps": fit.global_step,
        "last": saver.best_model_path,
    }


@processes
def test_islands_train_on_each_sample_once_and_end_with_one_model(tmp_path: Path) -> None:
    ranks = launch(_train, str(tmp_path), workers=4)
    assert Counter(sample for rank in ranks for sample in rank["seen"]) == dict.fromkeys(range(SAMPLES), 2)
    assert [rank["group"] for rank in ranks] == [(rank % 2, 2, rank, 4) for rank in range(4)]  # DDP's group is the island
    for rank in ranks[1:]:
        assert rank["model"] == ranks[0]["model"]
        assert (rank["logged"], rank["validated"], rank["report"]) == (
            ranks[0]["logged"],
            ranks[0]["validated"],
            ranks[0]["report"],
        )
    assert ranks[0]["logged"]["val_acc"] == pytest.approx(ranks[0]["validated"]["val_acc"])
    report = ranks[0]["report"]
    assert [island for island, *_ in report] == [0, 1]
    assert sum(seen for *_, seen in report) == 2 * SAMPLES
    assert sum(steps for _, steps, _ in report) == 2 * 13  # groups of two batches

    saved = torch.load(ranks[0]["last"], weights_only=False)
    plain = Net()
    plain.load_state_dict(saved["state_dict"])
    assert flat(plain).tolist() == ranks[0]["model"]
    alone = trainer(devices=1, strategy="auto").validate(plain, loader(50, shuffle=False), verbose=False)[0]
    assert alone["val_acc"] == pytest.approx(ranks[0]["logged"]["val_acc"])  # over all ranks: torchmetrics' too
    assert alone["val_loss"] == pytest.approx(ranks[0]["logged"]["val_loss"], rel=1e-5)


# -- one island is DDP -------------------------------------------------------------------------------------------------------


class Losses(RemembersLosses, Net):
    pass


def _hashes(optimizer: str, clipped: bool) -> list[tuple[str, list[float]]]:
    found: list[tuple[str, list[float]]] = []
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2} if clipped else {}
    for strategy in (islands(2), DDPStrategy(process_group_backend="gloo")):
        seed_everything(3)
        model = Losses(OPTIMIZERS[optimizer])
        data = samples(192)
        fit = trainer(strategy=strategy, max_epochs=2, use_distributed_sampler=False, **options)
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=int(dist_rank()), shuffle=True)
        fit.fit(model, DataLoader(data, batch_size=8, sampler=sampler))
        # the buffers of other ranks are their own until DDP sends them rank 0's before the next forward pass
        weights = flat(model) if dist_rank() == "0" else torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        found.append((hashlib.sha256(weights.numpy().tobytes()).hexdigest(), model.losses))
        assert len(model.losses) == 24
        if dist.is_initialized() and isinstance(strategy, ADPSGDStrategy):
            _forget(strategy)
    return found


def dist_rank() -> str:
    return os.environ["RANK"]


def _forget(strategy: ADPSGDStrategy) -> None:
    """Lets Lightning's own strategy make the default group."""
    dist.destroy_process_group()


@processes
@pytest.mark.parametrize(
    ("optimizer", "clipped"),
    [
        pytest.param(
            *(optimizer, clipped),
            id=f"{optimizer}-{'clipped and accumulated' if clipped else 'plain'}",
            marks=[] if clipped == (optimizer == "adamw") else pytest.mark.slow,
        )
        for optimizer in OPTIMIZERS
        for clipped in (False, True)
    ],
)
def test_one_island_is_ddp_bit_for_bit(optimizer: str, clipped: bool) -> None:
    for ours, ddp in launch(_hashes, optimizer, clipped, workers=2):
        assert ours == ddp


# -- the mean ----------------------------------------------------------------------------------------------------------------


def _still(at_rendezvous: str) -> Any:
    seed_everything(5)
    model = Net(lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    parted, strategy = Parted(2), islands(at_rendezvous=at_rendezvous)
    fit = trainer(strategy=strategy, callbacks=[parted], max_epochs=3)
    fit.fit(model, loader(400))
    report = strategy.report
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "first": parted.model[:count].tolist(),
        "last": flat(model)[:count].tolist(),
        "exchanges": [worker.exchanges for worker in report.workers],
        "distance": report.consensus_distance,
    }


@processes
@pytest.mark.parametrize("at_rendezvous", [pytest.param("adopt", marks=pytest.mark.slow), "evaluate"])
def test_without_updates_the_mean_of_the_islands_is_kept(at_rendezvous: str) -> None:
    ranks = launch(_still, at_rendezvous, workers=4)
    first = torch.tensor([rank["first"] for rank in ranks], dtype=torch.float64)
    last = torch.tensor([rank["last"] for rank in ranks], dtype=torch.float64)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert torch.equal(last[0], last[1])  # mates have one model, part by part from its owner
    assert torch.equal(last[2], last[3])
    assert all(exchanges > 0 for exchanges in ranks[0]["exchanges"])
    mean = first.mean(0)
    assert float((last.mean(0) - mean).norm() / mean.norm()) < 1e-6
    assert float((last[0] - last[2]).norm()) < 1e-3 * float((first[0] - first[2]).norm())


# -- bytes -------------------------------------------------------------------------------------------------------------------


class OtherMemory(torch.optim.SGD):
    """Gives each parameter other memory at each step, as SAM does, or a recurrent net that lays its weights together."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()
        return loss


def _bytes(island: int) -> Any:
    seed_everything(5)
    network = torch.nn.Sequential(torch.nn.Linear(8, 96), torch.nn.Linear(96, 2, bias=False))  # multiples of 16 elements
    model, strategy = Net(lambda model: OtherMemory(model.parameters(), lr=0.05), network), islands(island)
    fit = trainer(strategy=strategy, max_epochs=1)
    fit.fit(model, loader(800))
    numel = sum(parameter.numel() for parameter in model.parameters())
    return [(worker.exchanges, worker.bytes_sent) for worker in strategy.report.workers], numel, flat(model).tolist()


@processes
def test_a_rank_sends_a_kth_of_the_model_an_exchange_and_all_have_the_mean_whatever_memory_it_is_in() -> None:
    ranks = launch(_bytes, 2, workers=4)
    reports, numel, model = ranks[0]
    assert numel % 2 == 0
    for exchanges, sent in reports:
        assert exchanges > 0
        assert sent == exchanges * 4 * numel // 2
    assert all(theirs == model for _, _, theirs in ranks)


# -- refusals ----------------------------------------------------------------------------------------------------------------


def test_what_is_not_possible_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigurationError, match="island=0; it must be an integer >= 1, or 'node'"):
        ADPSGDStrategy(island=0)
    with pytest.raises(ConfigurationError, match="no argument 'find_unused_parameters'"):
        ADPSGDStrategy(find_unused_parameters=True)
    ADPSGDStrategy(island=2, find_unused_parameters=True, gradient_as_bucket_view=True)
    with pytest.raises(ConfigurationError, match="start_method='fork' with island=2 is not possible yet"):
        ADPSGDStrategy(island=2, start_method="fork")
    for other in (DPSGDStrategy, APSGDStrategy, EAMSGDStrategy, QSGDStrategy):
        with pytest.raises(ConfigurationError, match=f"island=2 is not possible with {other.__name__}: its workers are single"):
            other(island=2)
    with pytest.raises(ConfigurationError, match="island=3 does not divide the 4 ranks of the job"):
        trainer(strategy=ADPSGDStrategy(island=3), devices=4).fit(Net(), loader())


def test_a_wire_for_averagings_of_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeriodicAveragingStrategy, "root_device", torch.device("cuda", 0))
    fit = trainer(strategy=PeriodicAveragingStrategy(island=2, wire="int8"), devices=2)
    with pytest.raises(ConfigurationError, match="wire='int8' with island=2 is written in host memory"):
        fit.fit(Net(), loader())


def test_synchronized_statistics_are_refused_where_torch_has_none() -> None:
    synced = torch.nn.Sequential(torch.nn.SyncBatchNorm(8), torch.nn.Linear(8, 2))
    with pytest.raises(ConfigurationError, match=r"the layer 'network\.0' of the model is a SyncBatchNorm, .* devices only"):
        trainer(strategy=islands(), devices=4).fit(Net(network=synced), loader())
    with pytest.raises(ConfigurationError, match=r"Trainer\(sync_batchnorm=True\) is a SyncBatchNorm, .* devices only"):
        trainer(strategy=islands(), devices=4, sync_batchnorm=True).fit(Net(), loader())


class Thaws(BaseFinetuning):
    """A user's own, of which nobody can tell when it lets what require a gradient."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.network)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        raise AssertionError


def test_a_backbone_that_would_be_unfrozen_is_refused_before_a_process_starts() -> None:
    def begin(callback: Any, strategy: Any, max_epochs: int = 10, fn: str = "fit") -> None:
        fit = trainer(strategy=strategy, devices=4, max_epochs=max_epochs, callbacks=[callback])
        fit.state.fn = TrainerFn(fn)
        fit.strategy.preflight(fit, Net())  # type: ignore[attr-defined]

    with pytest.raises(ConfigurationError, match=r"BackboneFinetuning lets the backbone .* epoch 9, .* leave island"):
        trainer(strategy=islands(), devices=4, max_epochs=10, callbacks=[BackboneFinetuning(9)]).fit(Net(), loader())
    with pytest.raises(ConfigurationError, match="in epoch 9"):
        begin(BackboneFinetuning(9), islands(), max_epochs=-1)
    with pytest.warns(UserWarning, match="If Thaws lets parameters require a gradient after the fit has begun"):
        begin(Thaws(), islands())
    begin(BackboneFinetuning(10), islands())
    begin(BackboneFinetuning(9), islands(), fn="validate")
    begin(BackboneFinetuning(9), "adpsgd")


def test_one_island_only_is_a_warning() -> None:
    fit = trainer(strategy="adpsgd_islands", devices=4)
    strategy: Any = fit.strategy
    with pytest.warns(UserWarning, match="island='node' makes one island of all 4 ranks, which has nobody to gossip with"):
        strategy.preflight(fit, Net())


DDP_OPTIONS = {"find_unused_parameters": True, "gradient_as_bucket_view": True}


class Unused(Net):
    """With a layer that no batch goes through, which DDP has to be told of."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(3, 3)

    def on_train_start(self) -> None:
        wrapped: Any = self.trainer.strategy.model
        self.told = {name: getattr(wrapped, name) for name in DDP_OPTIONS}


def _finding_unused() -> Any:
    seed_everything(3)
    model, strategy = Unused(), islands(**DDP_OPTIONS)
    fit = trainer(strategy=strategy, max_epochs=2)
    fit.fit(model, loader(64))
    return model.told, flat(model).tolist()


@processes
def test_the_options_of_ddp_are_those_of_the_island() -> None:
    (first, model), *others = launch(_finding_unused, workers=4)
    assert first == DDP_OPTIONS
    assert [theirs for _, theirs in others] == [model] * 3


# -- death and return --------------------------------------------------------------------------------------------------------


class Killed(Callback):
    """Ends or freezes the process of a rank in the first batch of an epoch: each island is sure of one."""

    def __init__(self, rank: int, *, epoch: int = 1, signal_number: int = signal.SIGKILL) -> None:
        self._rank, self._epoch, self._signal = rank, epoch, signal_number

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if os.environ["RANK"] == str(self._rank) and (trainer.current_epoch, batch_idx) == (
            self._epoch,
            0,
        ):  # each island is sure of one
            os.kill(os.getpid(), self._signal)


class OwnGroup(Callback):
    """A user's own group of the default one's ranks, which are the island's; another island's end leaves it alone."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._group = dist.new_group()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        here = torch.ones(1)
        dist.all_reduce(here, group=self._group)
        self.sums.append(float(here))


def _losing(rank: int, signal_number: int, store: str | None) -> Any:
    seed_everything(1)
    model, strategy, own = Net(), islands(store=store, peer_timeout_s=5.0), OwnGroup()
    fit = trainer(strategy=strategy, callbacks=[Killed(rank, signal_number=signal_number), own], max_epochs=3)
    fit.fit(model, loader(403), loader(50, shuffle=False))
    return {
        "seen": model.seen,
        "model": flat(model).tolist(),
        "own group": own.sums,
        "ranks": (fit.global_rank, fit.world_size),
        "lost": strategy.report.lost,
        "loss": float(fit.callback_metrics["val_loss"]),
    }


@processes
@pytest.mark.parametrize("rank", [2, pytest.param(1, marks=pytest.mark.slow)])  # that which comes back has lost its second one
def test_an_island_dies_with_the_first_of_its_ranks_and_the_others_take_over_its_batches(rank: int) -> None:
    with store() as address, job(_losing, rank, int(signal.SIGKILL), address, workers=4) as running:
        running.start_all()
        left = survivors(running.outcomes(timeout_s=90.0))
    _check_left(left, lost=rank // 2)


@processes
@pytest.mark.slow
def test_a_rank_that_freezes_is_an_island_that_has_failed() -> None:
    with store() as address, job(_losing, 3, int(signal.SIGSTOP), address, workers=4) as running:
        pids = running.start_all()
        ends = running.ends(timeout_s=60.0, frozen=[3])
        os.kill(pids[3], signal.SIGKILL)
    assert [end.how for end in ends] == ["told", "told", "died", "late"]
    _check_left([end.value for end in ends[:2]], lost=1)


def _check_left(left: list[Any], *, lost: int) -> None:
    assert [outcome["ranks"] for outcome in left] == [(0, 2), (1, 2)]
    assert all(outcome["lost"] == [lost] for outcome in left)
    assert all(outcome["own group"] == [2.0, 2.0, 2.0] for outcome in left)
    assert left[0]["model"] == left[1]["model"]
    counts = Counter(sample for outcome in left for sample in outcome["seen"])
    assert set(counts) == set(range(403))
    assert len(left[0]["seen"]) > len(left[1]["seen"]) - 9  # mates share each group


def _until_both_are_back(address: str) -> Any:
    seed_everything(1)
    model, strategy = Net(), islands(store=address, peer_timeout_s=5.0)
    fit = trainer(strategy=strategy, callbacks=[Back(), Killed(3)], max_epochs=2000)
    fit.fit(model, loader(203), loader(50, shuffle=False))
    return {
        "rank": fit.global_rank,
        "model": flat(model).tolist(),
        "world": fit.world_size,
        "epoch": fit.current_epoch,
        "island": (dist.get_rank(), dist.get_world_size()),
        "exchanges": [worker.exchanges for worker in strategy.report.workers],
        "momentum": [float(state["momentum_buffer"].norm()) for state in fit.optimizers[0].state.values()],
    }


class Back(Callback):
    """Ends the fit when all are there, after the epoch in which an island was lost."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop |= trainer.current_epoch > 2 and trainer.world_size == 4


@processes
def test_an_island_comes_back_whole() -> None:
    with store() as address, job(_until_both_are_back, address, workers=4) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pid) for pid in pids[2:]], timeout=60)
        running.start(2)
        running.start(3)
        found = survivors(running.outcomes(timeout_s=120.0))
    assert sorted(outcome["rank"] for outcome in found) == [0, 1, 2, 3]
    for outcome in found:
        assert outcome["world"] == 4
        assert outcome["island"] == (outcome["rank"] % 2, 2)
        assert outcome["model"] == found[0]["model"]
        assert outcome["epoch"] == found[0]["epoch"]
        assert len(outcome["exchanges"]) == 2
        assert min(outcome["momentum"]) > 0


def test_how_many_may_be_left_or_come_is_counted_in_islands() -> None:
    survival = Survival(min_workers=2, max_workers=5).of_ranks(Islands(4))
    assert (survival.least, survival.most(8)) == (8, 20)
    assert Survival().of_ranks(Islands(4)).min_workers is None


def test_the_launcher_ends_the_mates_of_a_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickest way, and one that needs neither a store nor a thread of a process that hangs in a device's collective."""
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(5)]  # of rank 0's machine: 1 to 5
        stack.callback(lambda: [rank.kill() for rank in ranks])
        told: list[WorkerId] = []
        members: Any = SimpleNamespace(
            groups=IslandGroups(Islands(2), 0, 1.0), monitor=SimpleNamespace(process_ended=told.append)
        )
        monkeypatch.setattr(PatientObserver, "members", members)
        observer = PatientObserver(os.getpid(), ranks, first=1)
        assert not observer._run()
        ranks[2].send_signal(signal.SIGKILL)
        ranks[2].wait(10.0)
        observer._run()
        assert ranks[1].wait(10.0) == -signal.SIGKILL
        assert [rank.poll() for rank in ranks] == [None, -signal.SIGKILL, -signal.SIGKILL, None, None]
        assert told == [WorkerId(3, 1)]


@pytest.mark.parametrize(("rank", "place"), [(0, (0, True)), (1, (1, False)), (2, (0, True))])
def test_a_rank_that_comes_back_keeps_its_place_in_its_island_and_the_first_one_claims(
    rank: int, place: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes what there is one of, so nobody is rank 0 while outside; both ranks of its island waited for the other."""
    strategy = islands()
    strategy.groups = IslandGroups(Islands(2), rank, 1.0)
    members: Any = SimpleNamespace(outside=True, me=WorkerId(rank, 2), members=())
    monkeypatch.setattr(strategy, "_members", members)
    assert strategy.global_rank == max(1, rank)
    assert strategy.batches_of_rank == BatchesOfRank(2, *place)
    assert strategy.own_file == (2 * (rank // 2), place[1])


# -- averaging ---------------------------------------------------------------------------------------------------------------


def _averaging(name: str) -> Any:
    seed_everything(2)
    period: Any = AdaptivePeriod(sample=20) if name == "adaptive" else 5
    strategy = PeriodicAveragingStrategy(island=2, period=period, overlap=1 if name == "overlapped" else False, timeout=60.0)
    model = Net()
    fit = trainer(strategy=strategy, max_epochs=3)
    fit.fit(model, loader(SAMPLES), loader(50, shuffle=False))
    fit.validate(model, loader(50, shuffle=False), verbose=False)
    return {
        "model": flat(model).tolist(),
        "loss": float(fit.callback_metrics["val_loss"]),
        "report": [(worker.rank, worker.steps, worker.averagings, worker.period_mean) for worker in strategy.report.workers],
        "seen": model.seen,
        "deviation": [worker.deviation for worker in strategy.report.workers],
    }


@processes
@pytest.mark.parametrize(
    "name", ["adaptive", *(pytest.param(name, marks=pytest.mark.slow) for name in ("constant", "overlapped"))]
)
def test_islands_average_part_by_part(name: str) -> None:
    ranks = launch(_averaging, name, workers=4)
    for rank in ranks:
        assert rank["model"] == ranks[0]["model"]
        assert (rank["loss"], rank["report"]) == (ranks[0]["loss"], ranks[0]["report"])
    assert len(ranks[0]["report"]) == 2
    assert all(averagings >= 3 for _, _, averagings, _ in ranks[0]["report"])
    assert ranks[0]["deviation"][0] == ranks[0]["deviation"][1]  # of the whole model, known to all
    assert {sample for rank in ranks for sample in rank["seen"]} == set(range(SAMPLES))


# -- checkpoints -------------------------------------------------------------------------------------------------------------


class Waits(Callback):
    """The second island begins its second group when the first one asks to save: it might have taken all groups by then."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 2 and batch_idx == 1:
            assert eventually(trainer.strategy._fit._algorithm.sync_requested, 60.0)


def _saving(folder: str) -> Any:
    seed_everything(4)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit = trainer(strategy=islands(2), max_epochs=1, callbacks=[saver, Waits()])
    fit.fit(Net(), loader(MANY))


def _resuming(path: str, island: int) -> Any:
    seed_everything(9)
    model, strategy = Net(), islands(island)
    fit = trainer(strategy=strategy, max_epochs=2)
    fit.fit(model, loader(MANY), loader(50, shuffle=False), ckpt_path=path)
    momentum = [float(state["momentum_buffer"].norm()) for state in fit.optimizers[0].state.values()]
    return {
        "seen": model.seen,
        "model": flat(model).tolist(),
        "momentum": momentum,
        "loss": float(fit.callback_metrics["val_loss"]),
    }


@processes
def test_a_checkpoint_in_the_middle_of_an_epoch_resumes_on_other_islands(tmp_path: Path) -> None:
    launch(_saving, str(tmp_path), workers=4)
    first = tmp_path / "step=1.ckpt"  # each island is sure of one group of batches
    saved = torch.load(first, weights_only=False)
    state = saved["lightning_gossip"]["work"]
    batches = EpochPlan(**state["plan"]).batches(0)
    left = [sample for number in state["position"]["pending"] for sample in batches[number]]
    assert 0 < len(left) < MANY
    for island in (1, 4):
        ranks = launch(_resuming, str(first), island, workers=4)
        counts = Counter(sample for rank in ranks for sample in rank["seen"])
        assert counts == Counter(left) + Counter(range(MANY)), f"resumed with island={island}"
        for rank in ranks:
            assert rank["model"] == ranks[0]["model"]
            assert rank["loss"] == ranks[0]["loss"]
            assert min(rank["momentum"]) > 0


# -- the loss of one group ---------------------------------------------------------------------------------------------------


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _digits(seed: int, island: int) -> float:
    seed_everything(seed)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    train, held_out = random_split(data, [1400, 397], torch.Generator().manual_seed(0))
    fit = trainer(strategy=islands(island), max_epochs=12)
    fit.fit(Digits(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=64))
    return float(fit.callback_metrics["val_loss"])


@processes
@pytest.mark.slow
def test_two_islands_of_two_reach_the_loss_of_one_group() -> None:
    losses = {island: [launch(_digits, seed, island, workers=4)[0] for seed in range(3)] for island in (2, 4)}
    means = {island: sum(found) / len(found) for island, found in losses.items()}
    print(losses)
    assert means[2] < means[4] + 0.03, losses  # differences below .02 mean nothing with three seeds


@processes
@pytest.mark.slow
@pytest.mark.parametrize("island", [2, 4])
def test_eight_ranks_train_as_islands(island: int) -> None:
    ranks = launch(_train_eight, island, workers=8, timeout_s=240.0)
    assert Counter(sample for rank in ranks for sample in rank["seen"]) == dict.fromkeys(range(403), 2)
    assert all(rank["model"] == ranks[0]["model"] for rank in ranks)
    assert len(ranks[0]["report"]) == 8 // island


def _train_eight(island: int) -> Any:
    seed_everything(1)
    model, strategy = Net(), islands(island)
    trainer(strategy=strategy).fit(model, loader(403), loader(50, shuffle=False))
    return {"seen": model.seen, "model": flat(model).tolist(), "report": [worker.steps for worker in strategy.report.workers]}
