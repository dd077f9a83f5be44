"""Schedules by step in whole fits: with one worker, and with equal static shares, each batch has the learning rate of DDP."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from lightning_gossip.errors import ConfigurationError
from tests.strategies.launch import launch
from tests.strategies.models import loader, trainer

BATCHES = 8


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Lightning's launcher tells this process that it is the first worker."""
    with patch.dict(os.environ):
        yield


class Scheduled(LightningModule):
    """Remembers at which learning rate each batch was trained, and where its schedules stood at each epoch's end."""

    def __init__(self, schedules: Callable[[Any, Any], list[dict[str, Any]]], network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or nn.Linear(8, 2)
        self.rates: list[tuple[int, int, float]] = []
        self.ends: list[float] = []
        self._schedules = schedules

    @property
    def rate(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append((self.current_epoch, batch_idx, self.rate))
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.ends.append(self.rate)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), 1.0)
        return [sgd], [{"interval": "step", **schedule} for schedule in self._schedules(sgd, self.trainer)]


def halving(sgd: Any, _: Any = None, **options: Any) -> list[dict[str, Any]]:
    return [{"scheduler": ExponentialLR(sgd, 0.5), **options}]


def one_cycle(sgd: Any, of: Trainer) -> list[dict[str, Any]]:
    return [{"scheduler": OneCycleLR(sgd, 0.1, total_steps=int(of.estimated_stepping_batches))}]


def both(
    make: Callable[[], LightningModule], *, data: Callable[[], Any] = lambda: loader(8 * BATCHES), **options: Any
) -> list[tuple[Any, Any]]:
    """What a module has remembered under Lightning alone, and under this package."""
    found = []
    for strategy in ("auto", "adpsgd"):
        model: Any = make()
        chosen = {name: value() if callable(value) else value for name, value in options.items()}
        trainer(devices=1, strategy=strategy, **chosen).fit(model, data())
        found.append((model.rates, model.ends))
    return found


def test_max_steps_inside_an_epoch_leave_a_one_cycle_schedule_at_its_end() -> None:
    alone, here = both(lambda: Scheduled(one_cycle), max_steps=2 * BATCHES + 5, max_epochs=-1)
    assert here == alone
    assert len(here[0]) == 2 * BATCHES + 5


@pytest.mark.parametrize("batches", [7, 9])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("frequency", [3, 4])
def test_a_schedule_moves_once_in_frequency_batches_as_lightning_does(batches: int, accumulation: int, frequency: int) -> None:
    alone, here = both(
        lambda: Scheduled(lambda sgd, _: halving(sgd, frequency=frequency)),
        data=lambda: loader(8 * batches),
        accumulate_grad_batches=accumulation,
        max_epochs=3,
    )
    assert here == alone


def test_several_schedules_have_frequencies_of_their_own() -> None:
    def two(sgd: Any, _: Any) -> list[dict[str, Any]]:
        return [*halving(sgd, frequency=2), {"scheduler": ExponentialLR(sgd, 0.3), "frequency": 5}]

    alone, here = both(lambda: Scheduled(two))
    assert here == alone


class LeavesOut(Scheduled):
    """Ends each epoch after five batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


@pytest.mark.parametrize("accumulation", [1, 4])
def test_epochs_that_a_hook_cuts_move_schedules_no_further(accumulation: int) -> None:
    alone, here = both(lambda: LeavesOut(halving), max_epochs=3, accumulate_grad_batches=accumulation)
    assert here == alone
    assert len(here[0]) == 3 * 5


@pytest.mark.parametrize("normalised", [False, True])
def test_a_schedule_that_weight_averaging_has_replaced_moves_no_more(normalised: bool) -> None:
    layers = [nn.Linear(8, 4), *([nn.BatchNorm1d(4)] if normalised else []), nn.Linear(4, 2)]
    alone, here = both(
        lambda: Scheduled(one_cycle, nn.Sequential(*layers)),
        max_epochs=5,
        callbacks=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2)],
    )
    assert here == alone


class Replaces(Callback):
    """Puts another schedule in the place of the first one."""

    def __init__(self, hook: str, batch: int = 0) -> None:
        setattr(self, hook, self.replace)
        self.at = batch

    def replace(self, of: Trainer, model: Any, *args: Any) -> None:
        if of.current_epoch == 1 and (not args or args[-1] == self.at):
            of.strategy.setup_optimizers(of)


@pytest.mark.parametrize(
    ("hook", "batch"),
    [("on_train_epoch_start", 0), ("on_train_batch_start", 3), ("on_train_batch_end", 3), ("on_train_batch_end", BATCHES - 1)],
)
def test_a_schedule_that_comes_later_moves_from_there(hook: str, batch: int) -> None:
    alone, here = both(
        lambda: Scheduled(lambda sgd, _: halving(sgd, frequency=3)),
        max_epochs=3,
        callbacks=lambda: [Replaces(hook, batch)],
    )
    assert here == alone


class CountsItself(Scheduled):
    """Hands its schedule a number, as timm's want it."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.last_epoch = self.global_step - 1
        scheduler.step()


class WarmsUp(Scheduled):
    """Does not move its schedule in the first steps."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step > 5:
            scheduler.step()


@pytest.mark.parametrize("kind", [CountsItself, WarmsUp])
@pytest.mark.parametrize("frequency", [1, 3])
def test_a_hook_that_moves_schedules_its_own_way_is_called_as_often_as_by_lightning(kind: Any, frequency: int) -> None:
    def by_number(sgd: Any, _: Any) -> list[dict[str, Any]]:
        return [{"scheduler": LambdaLR(sgd, lambda step: 1 / (1 + step)), "frequency": frequency}]

    alone, here = both(lambda: kind(by_number))
    assert here == alone


class Plateau:
    """Follows a metric, and is not torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, metric: Any) -> None:
        self.optimizer.param_groups[0]["lr"] = 1 / (1 + float(metric))

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = state_dict


class FollowsMetric(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("steps", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric)


def plateau(sgd: Any, _: Any) -> list[dict[str, Any]]:
    return [{"scheduler": Plateau(sgd), "reduce_on_plateau": True, "monitor": "steps", "frequency": 3}]


def test_a_schedule_that_follows_a_metric_by_step_is_left_to_lightning() -> None:
    alone, here = both(lambda: FollowsMetric(plateau), callbacks=lambda: [Replaces("on_train_epoch_start")])
    assert here == alone
    assert len({rate for *_, rate in here[0]}) > 3


class StopsEpochs(Callback):
    """Leaves each epoch early, and lets the next one begin."""

    def on_train_batch_end(self, of: Trainer, model: Any, *args: Any) -> None:
        of.should_stop = args[-1] == 4

    def on_train_epoch_end(self, of: Trainer, *_: Any) -> None:
        of.should_stop = False


class Accumulates(Callback):
    """More, from the fourth batch of each epoch on."""

    def on_train_batch_start(self, of: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        of.accumulate_grad_batches = 1 if batch_idx < 3 else 4


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": lambda: [Accumulates()]},
        {"min_epochs": 2, "callbacks": lambda: [StopsEpochs()]},
        {"max_epochs": 3, "callbacks": lambda: [StopsEpochs()]},
        {"limit_train_batches": 5},
        {"limit_train_batches": 0.5, "max_steps": 6},
        {"overfit_batches": 3},
        {"callbacks": lambda: [GradientAccumulationScheduler({0: 4, 1: 3})], "max_epochs": 3},
        {"val_check_interval": 3},
    ],
    ids=lambda options: " ".join(options),
)
def test_the_rates_are_lightnings_with_other_limits(options: dict[str, Any]) -> None:
    alone, here = both(lambda: Scheduled(lambda sgd, _: halving(sgd, frequency=2)), **options)
    assert here == alone


@pytest.mark.parametrize("first", [BATCHES, BATCHES + 5])
@pytest.mark.parametrize(
    ("saved", "frequency", "accumulation"),
    [("by step", 3, 1), ("by epoch", 1, 1), ("by epoch", 1, 3), ("after the fit", 3, 1)],
)
def test_a_fit_that_goes_on_under_another_max_steps_has_the_rates_of_one_fit(
    tmp_path: Any, first: int, saved: str, frequency: int, accumulation: int
) -> None:
    """Where it was saved at an epoch's end Lightning's first epoch has one batch, the ninth of eight."""

    def fit(strategy: str, steps: int, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
        model = Scheduled(lambda sgd, _: halving(sgd, frequency=frequency))
        t = trainer(
            devices=1, strategy=strategy, max_epochs=-1, max_steps=steps, accumulate_grad_batches=accumulation, **options
        )
        t.fit(model, loader(8 * BATCHES), ckpt_path=ckpt_path)
        return model, t

    def savers(folder: Any) -> list[Any]:
        every = {"by step": {"every_n_train_steps": first}, "by epoch": {"every_n_epochs": 1}, "after the fit": None}[saved]
        return (
            [] if every is None else [ModelCheckpoint(folder, "{step}", save_top_k=-1, enable_version_counter=False, **every)]
        )

    def rates(model: Any) -> list[float]:
        return [rate for *_, rate in model.rates]

    found, last = [], 3 * BATCHES - 1
    for strategy in ("auto", "adpsgd"):
        path = tmp_path / strategy / f"step={first}.ckpt"
        _, t = fit(strategy, first + 3 * (saved == "by step"), callbacks=savers(path.parent))
        if saved == "after the fit":
            t.save_checkpoint(path)
        model, _ = fit(strategy, last, path, callbacks=savers(path.parent))
        found.append((rates(model), model.ends[-1]))
    assert found[0] == found[1]
    if accumulation == 1 and (first % BATCHES or frequency == 1):
        straight, _ = fit("adpsgd", last)
        assert found[1] == (rates(straight)[first:], straight.ends[-1])


def test_a_checkpoint_of_lightnings_inside_an_epoch_leaves_a_one_cycle_schedule_at_its_end(tmp_path: Any) -> None:
    rates = []
    for strategy in ("auto", "adpsgd"):
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=BATCHES + 3, enable_version_counter=False)
        trainer(devices=1, strategy="auto", callbacks=[saver]).fit(Scheduled(one_cycle), loader(8 * BATCHES))
        model = Scheduled(one_cycle)
        trainer(devices=1, strategy=strategy).fit(model, loader(8 * BATCHES), ckpt_path=tmp_path / f"step={BATCHES + 3}.ckpt")
        rates.append((model.rates, model.ends))
    assert rates[1] == rates[0]
    assert len(rates[0][0]) == BATCHES - 3


def test_the_schedule_that_users_find_is_their_own() -> None:
    model = Scheduled(one_cycle)
    t = trainer(devices=1)
    t.fit(model, loader(8 * BATCHES))
    assert type(t.lr_scheduler_configs[0].scheduler) is OneCycleLR
    assert model.lr_schedulers() is t.lr_scheduler_configs[0].scheduler


# -- two workers ---------------------------------------------------------------------------------------------------------


class Slow(Callback):
    """Rank 0 is slow."""

    def on_train_batch_start(self, of: Trainer, *_: Any) -> None:
        time.sleep(0.01 if of.global_rank == 0 else 0.0)


def _fit(model: Any, callbacks: list[Any] | None = None, **options: Any) -> Any:
    trainer(callbacks=callbacks or [], **options).fit(model, loader(2 * 8 * BATCHES), ckpt_path=options.pop("ckpt_path", None))
    return model.rates, model.ends


def _stopped_and_resumed(folder: str) -> Any:
    seen = []
    for steps, path in ((BATCHES + 5, None), (2 * BATCHES + 3, f"{folder}/last.ckpt")):
        model = Scheduled(lambda sgd, _: halving(sgd, frequency=2))
        saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
        t = trainer(max_steps=steps, max_epochs=-1, callbacks=[saver])
        t.fit(model, loader(2 * 8 * BATCHES), ckpt_path=path)
        seen += [rate for *_, rate in model.rates]
    return seen


def _of_two(folder: str) -> Any:
    found = {}
    for strategy in ("adpsgd", "qsgd"):
        found[f"max_steps {strategy}"] = _fit(Scheduled(one_cycle), max_steps=BATCHES + 5, max_epochs=-1, strategy=strategy)
    seldom = Scheduled(lambda sgd, _: halving(sgd, frequency=3))
    found["frequency"] = _fit(seldom, [Slow()], accumulate_grad_batches=2, max_epochs=3)
    found["cut"] = _fit(LeavesOut(halving), [Slow()], max_epochs=3)
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2)
    found["averaging"] = _fit(Scheduled(one_cycle), [averaging], max_epochs=5)
    found["replaced"] = _fit(Scheduled(halving), [Slow(), Replaces("on_train_epoch_start")], max_epochs=3)
    found["stopped"] = _fit(Scheduled(halving), [Slow(), StopsEpochs()], max_epochs=3)
    found["resumed"] = _stopped_and_resumed(folder)
    with pytest.raises(ConfigurationError) as refused:
        _fit(FollowsMetric(plateau))
    found["refused"] = str(refused.value)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Any:
    return launch(_of_two, str(tmp_path_factory.mktemp("two")), timeout_s=180.0)


@pytest.fixture
def ends(two: Any, request: Any) -> tuple[list[float], list[float]]:
    """Of both ranks, the rates at the ends of the epochs of a fit."""
    return two[0][request.param][1], two[1][request.param][1]


processes = pytest.mark.processes


@processes
@pytest.mark.parametrize("strategy", ["adpsgd", "qsgd"])
def test_max_steps_with_two_workers_have_the_rates_of_one_with_as_many_batches(two: Any, strategy: str) -> None:
    _, alone = both(lambda: Scheduled(one_cycle), max_steps=BATCHES + 5, max_epochs=-1)
    assert two[0][f"max_steps {strategy}"] == two[1][f"max_steps {strategy}"] == alone


@processes
@pytest.mark.parametrize("ends", ["frequency"], indirect=True)
def test_a_frequency_counts_batches_as_if_all_were_equally_fast(ends: Any) -> None:
    """Of eight batches it moves after the sixth only, where a step ends: a slow worker may have no sixth."""
    assert ends[0] == ends[1] == [0.5, 0.25, 0.125]


@processes
@pytest.mark.parametrize("ends", ["cut"], indirect=True)
def test_epochs_that_hooks_cut_on_all_ranks_move_schedules_as_far_as_they_came(ends: Any) -> None:
    """A slow worker leaves the end of the epoch to the fast one, which leaves it out."""
    assert ends[0] == ends[1]
    moved = [math.log2(before / after) for before, after in itertools.pairwise([1.0, *ends[0]])]
    assert all(0 < moves < 8 for moves in moved)


@processes
@pytest.mark.parametrize("ends", ["averaging"], indirect=True)
def test_weight_averaging_with_two_workers_ends_at_its_own_rate(ends: Any) -> None:
    assert ends[0] == ends[1]
    assert ends[0][-1] == pytest.approx(0.05)


@processes
@pytest.mark.parametrize("ends", ["replaced"], indirect=True)
def test_a_schedule_that_comes_with_an_epoch_follows_all_workers_too(ends: Any) -> None:
    assert ends[0] == ends[1] == [2.0**-8, 2.0**-8, 2.0**-16]


@processes
@pytest.mark.parametrize("ends", ["stopped"], indirect=True)
def test_ranks_have_one_rate_where_all_have_left_an_epoch_early(ends: Any) -> None:
    assert ends[0] == ends[1]
    assert ends[0][-1] > 2.0**-24


@processes
def test_a_metric_by_step_is_refused_where_work_is_shared(two: Any) -> None:
    assert "Use interval='epoch'" in two[0]["refused"]


@processes
def test_a_fit_of_two_workers_that_goes_on_has_the_rates_of_one(two: Any) -> None:
    assert two[0]["resumed"] == two[1]["resumed"]
    assert two[0]["resumed"] == [0.5 ** (step % BATCHES // 2 + step // BATCHES * 4) for step in range(2 * BATCHES + 3)]
