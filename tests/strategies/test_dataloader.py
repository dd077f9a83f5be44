"""The training loader as users read it, and what follows when another one is loaded."""

from __future__ import annotations

import time
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.strategies.data.batch_samplers import SharedBatches
from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.lightning.patches import Patches
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, samples, trainer


class Reads(Net):
    """Reads what schedules are reckoned from; rank 1 is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.estimated: list[int] = []
        self.progress: list[float] = []
        self.told: list[tuple[bool, bool]] = []
        self.reading: set[Any] = set()

    def setup(self, stage: str) -> None:
        self.estimated.append(self.trainer.estimated_stepping_batches)

    def on_train_epoch_end(self) -> None:
        self.estimated.append(self.trainer.estimated_stepping_batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01 * self.trainer.global_rank)
        self.note(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx)

    def note(self, batch_idx: int) -> None:
        t = self.trainer
        batches, shown = t.num_training_batches, t.train_dataloader
        self.told.append((batch_idx == batches - 1, t.is_last_batch))
        self.progress.append((batch_idx / batches + t.current_epoch) / t.max_epochs)
        shown.sampler.set_epoch(99)
        self.reading.add(
            (
                len(shown),
                shown.batch_size,
                shown.drop_last,
                isinstance(shown.sampler, DistributedSampler),
                len(shown.sampler),
                shown.batch_sampler.batch_size,
                shown.batch_sampler.drop_last,
                len(shown.dataset),
            )
        )


def _reads(strategy: str) -> Any:
    data, seen = CombinedLoader(loader(130, 4), "max_size_cycle"), []
    for _ in range(2):
        model = Net()
        trainer(strategy=strategy, max_epochs=1).fit(model, data)
        seen.append(model.seen)
    reads = Reads()
    trainer(strategy=strategy, max_epochs=3).fit(reads, loader(130, 4))
    return [*seen, reads.seen], reads.estimated, reads.progress, reads.told, reads.reading


class Growing(LightningDataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        if self.trainer.train_dataloader is not None:
            len(self.trainer.train_dataloader)  # of the epoch before
        return loader(48 * (1 + self.trainer.current_epoch), 8)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CountsSpeeds(Callback):
    """At each epoch's end: how many workers are in the sum of rates that claims go by; None where nobody claims."""

    def __init__(self) -> None:
        self.counted: list[int | None] = []

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        shared = trainer.strategy._fit.work.shared
        if shared is None:
            self.counted.append(None)
            return
        speeds, store = shared._speeds, shared._store
        self.counted.append(speeds.own.rates.read(store.add(f"{speeds.key}/rates", 0))[0])


def _grows(strategy: str) -> Any:
    model, counts = Scheduled(), CountsSpeeds()
    t = trainer(strategy=strategy, max_epochs=4, reload_dataloaders_every_n_epochs=1, callbacks=[counts])
    t.fit(model, datamodule=Growing())
    return model.seen, t.optimizers[0].param_groups[0]["lr"], counts.counted


STRATEGIES = ["adpsgd", "periodic_averaging", "qsgd"]


def _all() -> Any:
    return {"reads": _reads("adpsgd"), **{strategy: _grows(strategy) for strategy in STRATEGIES}}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return launch(_all, timeout_s=180.0)


@pytest.mark.processes
def test_progress_by_the_number_of_batches_rises_to_one_and_the_last_batch_comes_once_an_epoch(ranks: Any) -> None:
    for rank in ranks:
        _, estimated, progress, told, _ = rank["reads"]
        assert estimated == [51] * 4
        assert all(is_last == says_last for says_last, is_last in told)
        assert sum(is_last for _, is_last in told) == 2 * 3
        assert sorted(progress) == progress
        assert progress[0] == 0
        assert 0.5 < progress[-1] < 1  # a slow worker leaves the last batches to the others
    assert max(rank["reads"][2][-1] for rank in ranks) > 0.9


@pytest.mark.processes
def test_the_training_loader_reads_as_the_users_under_ddp(ranks: Any) -> None:
    for rank in ranks:
        assert rank["reads"][-1] == {(17, 4, False, True, 65, 4, False, 130)}


@pytest.mark.processes
def test_reading_takes_nothing_and_a_combined_loader_may_be_passed_again(ranks: Any) -> None:
    for fit, epochs in enumerate((1, 1, 3)):
        assert Counter(ranks[0]["reads"][0][fit] + ranks[1]["reads"][0][fit]) == dict.fromkeys(range(130), epochs)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_schedules_follow_a_data_set_that_grows(ranks: Any, strategy: str) -> None:
    assert [rank[strategy][1] for rank in ranks] == pytest.approx([0.9**30] * 2)  # 3 + 6 + 9 + 12 steps
    seen = Counter(ranks[0][strategy][0] + ranks[1][strategy][0])
    assert seen == Counter(sample for epoch in range(1, 5) for sample in range(48 * epoch))


@pytest.mark.processes
def test_a_worker_counts_once_among_the_speeds_however_often_the_loader_is_made_anew(ranks: Any) -> None:
    assert [rank["adpsgd"][2][-1] for rank in ranks] == [2, 2]
    assert all(rank["qsgd"][2] == [None] * 4 for rank in ranks)


# -- in one process ----------------------------------------------------------------------------------------------------


def work_of(data: Any, **options: Any) -> tuple[FitWork, Any]:
    """A worker's batches before training, of the loaders that a hook makes one after the other."""
    t = trainer(devices=1, **options)
    t.strategy._lightning_module = Net()
    t.fit_loop._data_source.dataloader = lambda: next(data)
    work = FitWork(t, "auto", key="fit", seed=3, batch_s=lambda: None)
    work.install(Patches())
    made = work.process(t.fit_loop._data_source.dataloader())
    t.fit_loop._combined_loader = CombinedLoader(made)
    return work, t


@pytest.mark.parametrize("reload", [0, 1])
def test_one_that_comes_later_reads_the_loader_of_its_first_epoch(reload: int) -> None:
    options = {"reload_dataloaders_every_n_epochs": reload}
    late, t = work_of(iter([loader(16, 4), loader(48, 4)]), **options)
    there, _ = work_of(iter([loader(48, 4)]), **options)
    snapshot = {**there.snapshot(), "loaded_at": 2}
    assert (late.about == there.about) == bool(reload)
    if reload:
        late.apply_snapshot(snapshot)
        assert t.fit_loop._last_train_dl_reload_epoch == 2
        assert [len(one.dataset) for one in t.fit_loop._combined_loader.flattened] == [48]
        assert late.batches is not None
        assert there.batches is not None
        assert late.batches.plan == there.batches.plan


def test_the_order_follows_the_generator_of_the_users_sampler() -> None:
    def order(seed: int | None) -> list[int]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        _, t = work_of(iter([loader(64, 4, generator=generator)]))
        return list(t.train_dataloader.sampler)

    assert order(1) == order(1) != order(2) != order(None)


def test_batches_out_of_order_are_passed_on() -> None:
    _, t = work_of(iter([loader(64, 4, num_workers=1, in_order=False)]))
    assert not t.train_dataloader.in_order


def test_the_share_of_the_run_that_is_done_rises_when_epochs_grow() -> None:
    account = Account(0, Timeline())
    account.begin(0, 3 * 4)
    shares = []
    for epoch in range(4):
        if epoch:
            account.plan_anew(3 * (epoch + 1) * (4 - epoch))
        for _ in range(3 * (epoch + 1)):
            step = account.count_step(lr=0.1, epoch=epoch)
            shares.append(step.progress)
        assert step.progress == Fraction(epoch + 1, 4)
    assert shares == sorted(shares)  # type: ignore[type-var]
    account.plan_anew(None)
    assert account.count_step(lr=0.1, epoch=4).progress is None


def test_a_shared_loader_has_no_length_for_the_training_loop_only() -> None:
    work, _ = work_of(iter([loader(64, 4)]))
    assert work.batches is not None
    training = False
    shared = SharedBatches(
        work.batches.plan,
        rank=0,
        workers=3,
        epoch=lambda: 0,
        training=lambda: training,
        store=None,
        key="",
        lookahead=1,
        batch_s=lambda: None,
    )
    made = DataLoader(samples(64), batch_sampler=shared)
    assert len(made) == len(list(made)) == 6
    training = True
    with pytest.raises(TypeError):
        len(made)
