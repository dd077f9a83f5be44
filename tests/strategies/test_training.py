from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_gossip import ADPSGDStrategy, ConfigurationError, PeerError
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, samples, trainer

pytestmark = pytest.mark.processes


def fit(model: Net | None = None, data: Any = None, validation: Any = None, **options: Any) -> tuple[Any, Net]:
    model = model or Net()
    t = trainer(**options)
    t.fit(model, data if data is not None else loader(), validation)
    return t, model


class Slow(Callback):
    """Pads the batches of some ranks."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        import time

        time.sleep(self.seconds.get(trainer.global_rank, 0.0))


# -- sharing -----------------------------------------------------------------------------------------------------------


def _every_sample_once(num_workers: int) -> Any:
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        # they prefetch a whole share and more before the first step
        options.update(multiprocessing_context="fork", persistent_workers=True, prefetch_factor=6)
    epochs: list[list[int]] = []

    class Split(Callback):
        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            epochs.append(list(model.seen))
            model.seen.clear()

    fit(data=loader(130, 4, **options), callbacks=[Slow({1: 0.05}), Split()], max_epochs=2)
    return epochs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_is_taken_exactly_once_an_epoch_although_one_worker_is_slow(num_workers: int) -> None:
    per_rank = launch(_every_sample_once, num_workers, workers=3)
    for epoch in range(2):
        counts = Counter(index for epochs in per_rank for index in epochs[epoch])
        assert counts == Counter(range(130))
    assert len(per_rank[1][1]) < max(len(per_rank[0][1]), len(per_rank[2][1]))
    if num_workers:
        batches = [math.ceil(len(epochs[0]) / 4) for epochs in per_rank]
        assert batches == [11, 11, 11], "in the first epoch, when nobody's step time is known, each takes its fair share"


def _static(option: dict[str, Any]) -> Any:
    _, model = fit(data=loader(64, 4), validation=loader(16, 4, shuffle=False), max_epochs=1, **option)
    return model.seen


@pytest.mark.parametrize(
    "option", [{"val_check_interval": 0.5}, {"limit_train_batches": 8}, {"strategy": ADPSGDStrategy(work_sharing=False)}]
)
def test_counts_of_each_workers_own_keep_equal_static_shares(option: dict[str, Any]) -> None:
    a, b = launch(_static, option)
    assert len(a) == len(b) == 32
    assert sorted(a + b) == list(range(64))


def _one_slow_worker() -> Any:
    distances: list[list[float]] = []

    class Collect(Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            distances.append([w.distance for w in trainer.strategy.report.workers])

    strategy = ADPSGDStrategy(at_rendezvous="evaluate", topology="complete")
    slow = Slow({1: 0.05, 0: 0.005, 2: 0.005, 3: 0.005})
    t, _ = fit(data=loader(640, 4), callbacks=[slow, Collect()], max_epochs=8, strategy=strategy)
    return t.strategy.report.workers, distances


@pytest.mark.slow  # tests/runtime/adpsgd/test_gossip.py shows the same of the exchanges
@pytest.mark.alone
def test_a_slow_worker_exchanges_as_often_as_the_others_and_stays_as_near_to_the_mean() -> None:
    workers, distances = launch(_one_slow_worker, workers=4)[0]
    slow, others = workers[1], [workers[0], *workers[2:]]
    assert slow.steps < 0.5 * min(w.steps for w in others)
    # all trained for the same time, so exchanges compare as rates
    assert slow.exchanges >= 0.5 * sorted(w.exchanges for w in workers)[2]
    # one snapshot says little: means over the epochs' ends
    means = [sum(values) / len(values) for values in zip(*distances, strict=True)]
    assert means[1] <= 2.0 * max(means[0], means[2], means[3])


def _own_sampler() -> Any:
    class Odd(SequentialSampler):
        pass

    data = samples(32)
    t = trainer(max_epochs=1, use_distributed_sampler=False)
    model = Net()
    t.fit(model, DataLoader(data, batch_size=4, sampler=Odd(data)))
    return model.seen


def test_the_users_own_sampler_is_kept() -> None:
    a, b = launch(_own_sampler)
    assert a == b == list(range(32))


class Stream(IterableDataset[Any]):
    """As many batches as the rank says."""

    def __iter__(self) -> Any:
        count = {0: 7, 1: 11}[dist.get_rank()] * 4
        yield from (samples(count)[i] for i in range(count))


def _uneven() -> Any:
    t, model = fit(data=DataLoader(Stream(), batch_size=4), max_epochs=2)
    return t.global_step, len(model.seen), flat(model).tolist()


def test_uneven_streams_end_and_agree() -> None:
    a, b = launch(_uneven)
    assert a[1] == 2 * 28
    assert b[1] == 2 * 44
    assert a[0] == b[0] == 18  # the mean of 14 and 22 steps
    assert a[2] == b[2]


def _peeks() -> Any:
    class Peek(Callback):
        """Rank 0 looks at the data, as callbacks that log images do."""

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_rank == 0:
                next(iter(trainer.train_dataloader))

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            assert len(list(trainer.train_dataloader)) == 8

    return fit(callbacks=[Peek()], max_epochs=3)[1].seen


def test_looking_at_the_training_data_takes_nothing_from_the_epoch() -> None:
    a, b = launch(_peeks)
    assert Counter(a + b) == dict.fromkeys(range(128), 3)


# -- the model ---------------------------------------------------------------------------------------------------------


def _start_equal() -> Any:
    import os

    seed_everything(int(os.environ["RANK"]))
    states = []
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    network[0].weight.requires_grad_(False)
    network[1].running_mean.normal_()
    network[1].num_batches_tracked += int(os.environ["RANK"])
    network.register_buffer("random", torch.rand(3))

    class Look(Callback):
        def on_train_start(self, trainer: Any, model: Any) -> None:
            states.append({name: value.tolist() for name, value in model.state_dict().items()})

    fit(Net(network=network), callbacks=[Look()], max_epochs=1)
    return states[0], network[0].weight.tolist()


def test_parameters_frozen_ones_and_buffers_start_bit_identical_whatever_the_seeds() -> None:
    results = launch(_start_equal, workers=3)
    assert results[0] == results[1] == results[2]


def _without_optimizer() -> Any:
    class Frozen(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += batch[2].tolist()
            return self.loss(batch)

        def configure_optimizers(self) -> None:  # type: ignore[override]
            """Nothing is to be optimized."""

    return fit(Frozen(), max_epochs=1)[1].seen


def test_a_module_without_an_optimizer_sees_the_epoch() -> None:
    a, b = launch(_without_optimizer)
    assert Counter(a + b) == dict.fromkeys(range(128), 1)


def _unfreezes() -> Any:
    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                model.network[0].requires_grad_(True)

    model = Net()
    model.network[0].requires_grad_(False)
    return flat(fit(model, callbacks=[Unfreeze()], max_epochs=1)[1]).tolist()


def test_parameters_unfrozen_inside_an_epoch_are_averaged_at_its_end() -> None:
    a, b = launch(_unfreezes)
    assert a == b


class Wild(nn.Module):
    """Tied weights, a branch used on odd ranks only, a frozen layer, channels_last, complex and half-precision tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.odd = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.out = nn.Linear(32, 2)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("narrow", torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x.view(-1, 1, 2, 4))).flatten(1)
        h = self.frozen(self.b(self.a(h)))
        if dist.get_rank() % 2:
            h = self.odd(h)
        return self.out(h) + self.phase.abs().sum()


def _wild() -> Any:
    network = Wild()
    before = [(t.data_ptr(), t.stride()) for t in [*network.parameters(), *network.buffers()]]
    t, model = fit(Net(network=network), max_epochs=2)
    after = [(t.data_ptr(), t.stride()) for t in [*network.parameters(), *network.buffers()]]
    assert before == after
    assert network.a.weight is network.b.weight
    assert t.strategy.report.workers[0].exchanges
    return flat(model.network).tolist(), torch.view_as_real(network.phase.detach()).tolist()


def test_tied_unused_frozen_complex_and_channels_last_tensors_are_averaged_in_place() -> None:
    results = launch(_wild, workers=3)
    assert results[0] == results[1] == results[2]
    assert all(math.isfinite(value) for value in results[0][0])


def _mean() -> Any:
    captured = {}

    class Capture(Callback):
        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            captured["mean"] = flat(model)
            with trainer.strategy._fit._own_model.in_place():
                captured["own"] = flat(model)

    strategy = ADPSGDStrategy(at_rendezvous="evaluate", exchanges_per_step=0)
    t, model = fit(callbacks=[Capture()], max_epochs=1, strategy=strategy)
    own = captured["own"]
    everyones = [torch.empty_like(own) for _ in range(3)]
    dist.all_gather(everyones, own)
    distance = sum(((x - captured["mean"]) ** 2).sum().item() for x in everyones) / 3
    torch.testing.assert_close(captured["mean"], torch.stack(everyones).mean(0), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(own, captured["mean"])
    assert t.strategy.report.consensus_distance == pytest.approx(distance, rel=1e-3)
    assert torch.equal(flat(model), captured["mean"])  # after the fit everybody has the mean
    return captured["mean"].tolist()


def test_a_synchronisation_point_leaves_the_exact_mean_bit_identical_on_all_ranks() -> None:
    results = launch(_mean, workers=3)
    assert results[0] == results[1] == results[2]


def _evaluate_mode() -> Any:
    at_start, at_end = [], []

    class Own(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0 and self.current_epoch == 1:  # before any step of this epoch
                at_start.append(flat(self).sum().item())
            return super().training_step(batch, batch_idx)

        def on_validation_end(self) -> None:
            at_end.append(flat(self).sum().item())

    strategy = ADPSGDStrategy(at_rendezvous="evaluate", exchanges_per_step=0)
    t, model = fit(Own(), strategy=strategy, validation=loader(32, shuffle=False))
    fitted = flat(model).sum().item()
    t.validate(model, loader(32, shuffle=False), verbose=False)
    assert flat(model).sum().item() == fitted
    return at_start, at_end


def test_evaluate_validates_the_mean_and_then_puts_each_workers_own_model_back() -> None:
    (start_a, end_a), (start_b, end_b) = launch(_evaluate_mode)
    assert end_a == end_b
    assert start_a != start_b


# -- what users train with ---------------------------------------------------------------------------------------------


def _recipe(options: dict[str, Any], optimizer: str) -> Any:
    makers: dict[str, Any] = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=2),
        "fused_adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    }
    seed_everything(0)
    t, model = fit(Net(makers[optimizer]), validation=loader(64, shuffle=False), max_epochs=4, **options)
    assert all(w.exchanges > 0 and w.steps > 0 for w in t.strategy.report.workers)
    return t.callback_metrics["val_acc"].item(), flat(model).tolist()


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        # tests/strategies/test_conformance.py has the like of these for all strategies
        pytest.param({"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, "sgd", marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-mixed"}, "adamw", marks=pytest.mark.slow),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "fused_adam"),
        ({}, "lbfgs"),
    ],
    ids=["accumulate+clip", "bf16", "fused", "closure"],
)
def test_optimizers_precisions_accumulation_and_clipping_work(options: dict[str, Any], optimizer: str) -> None:
    (acc_a, model_a), (acc_b, model_b) = launch(_recipe, options, optimizer)
    assert acc_a == acc_b
    assert acc_a > 0.7 or optimizer == "lbfgs"  # whose memory of curvature does not expect its parameters to be averaged
    assert model_a == model_b


class TwoOptimizers(Net):
    """Manual optimization with two optimizers over different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.seen += batch[2].tolist()
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        layers = list(self.network)
        return [torch.optim.SGD(layers[0].parameters(), lr=0.1), torch.optim.Adam(layers[3].parameters(), lr=0.01)]


def _manual() -> Any:
    t, model = fit(TwoOptimizers(), validation=loader(64, shuffle=False), max_epochs=3)
    return t.global_step, t.callback_metrics["val_acc"].item(), flat(model).tolist()


def test_manual_optimization_with_two_optimizers_works() -> None:
    a, b = launch(_manual)
    assert a == b
    assert a[0] == 2 * 3 * 8  # two optimizers, three epochs, 16 batches by two workers
    assert a[1] > 0.7


def _compiled(what: str) -> Any:
    model = Net()
    if what == "network":
        model.network = torch.compile(model.network, backend="eager")
    compiled = torch.compile(model, backend="eager") if what == "module" else model
    t = trainer(max_epochs=2)
    t.fit(compiled, loader(), loader(64, shuffle=False))
    return flat(model).tolist(), t.callback_metrics["val_acc"].item()


@pytest.mark.parametrize("what", ["network", pytest.param("module", marks=pytest.mark.slow)])
def test_a_compiled_model_is_averaged_as_another(what: str) -> None:
    a, b = launch(_compiled, what)
    assert a == b
    assert a[1] > 0.7


# -- decisions ---------------------------------------------------------------------------------------------------------


class RankMetric(Net):
    """Logs a value that differs over ranks and stalls on one of them."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        stalls = 1.0 if self.global_rank == 0 else 1.0 / (self.current_epoch + 1)
        self.log("odd", torch.tensor(stalls))


def _plateau() -> Any:
    def optimizer(model: Any) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, threshold=0.3)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "odd"}}

    t, _ = fit(RankMetric(optimizer), validation=loader(16, shuffle=False), max_epochs=5)
    return t.optimizers[0].param_groups[0]["lr"], t.callback_metrics["odd"].item()


def test_reduce_lr_on_plateau_keeps_one_learning_rate() -> None:
    results = launch(_plateau, workers=3)
    assert results[0] == results[1] == results[2]
    assert results[0][0] < 0.1


def _early_stopping() -> Any:
    stopping = EarlyStopping("odd", patience=1, min_delta=0.2)
    t, _ = fit(RankMetric(), validation=loader(16, shuffle=False), max_epochs=9, callbacks=[stopping])
    return t.current_epoch


def test_early_stopping_on_a_metric_that_depends_on_the_rank_stops_all_at_the_same_epoch() -> None:
    a, b = launch(_early_stopping)
    assert a == b < 9


class Quitter(Callback):
    """One rank wants to stop in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # of the batches that it shares each worker is sure of one only
        if trainer.global_rank == 1 and trainer.current_epoch == 1 and args[-1] == 0:
            trainer.should_stop = True


def _quit(validation: bool) -> Any:
    t, model = fit(callbacks=[Quitter()], max_epochs=9, validation=loader(16, shuffle=False) if validation else None)
    return t.current_epoch, flat(model).tolist()


@pytest.mark.parametrize("validation", [True, False])
def test_should_stop_on_one_rank_inside_an_epoch_ends_all_after_it(validation: bool) -> None:
    a, b = launch(_quit, validation)
    assert a == b
    assert a[0] == 2


class _Skips(Net):
    """Rank 1 leaves out its second epoch: of the batches that it shares it is sure of one only."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.global_rank, self.current_epoch, batch_idx) == (1, 1, 0) else None

    def on_validation_epoch_start(self) -> None:
        self.validated.append(self.current_epoch)


def _skip() -> Any:
    t, model = fit(_Skips(), max_epochs=4, validation=loader(16, shuffle=False))
    return model.validated, t.current_epoch, flat(model).tolist(), model.seen


def test_where_a_hook_skips_the_rest_of_a_ranks_epoch_no_rank_validates_it() -> None:
    """As Lightning does that leaves the epoch so; the other rank trains on, but for what this one has taken already."""
    a, b = launch(_skip)
    assert a[:3] == b[:3]
    assert a[0] == [0, 2, 3]
    assert 3 * 128 < len(a[3]) + len(b[3]) < 4 * 128


def _one_cycle() -> Any:
    def optimizer(model: Any) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        total = model.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=0.1, total_steps=int(total))
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    t, model = fit(Net(optimizer), data=loader(164, 4), callbacks=[Slow({0: 0.03})], max_epochs=2)
    return t.optimizers[0].param_groups[0]["lr"], t.lr_scheduler_configs[0].scheduler.last_epoch, len(model.seen)


def test_step_schedules_follow_the_work_of_all_so_that_fast_and_slow_workers_have_one_rate() -> None:
    a, b = launch(_one_cycle)
    assert a[:2] == b[:2]
    assert a[1] == 2 * 21  # 41 batches by two workers, two epochs: what estimated_stepping_batches says
    assert a[2] < b[2]


# -- logging -----------------------------------------------------------------------------------------------------------


class LogsEverything(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.accuracy(self.network(batch[0]), batch[1])
        self.accuracy.compute()  # in the middle of the epoch
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        return loss


class Synchronises(Net):
    """Asks the strategy for all workers in the middle of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.log_dir is not None  # a property that broadcasts
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.reduce(torch.tensor(float(self.global_rank))) == self.global_rank
        if self.trainer.current_epoch == 1:
            self.all_gather(torch.ones(1))
        return super().training_step(batch, batch_idx)


def _synchronises() -> Any:
    with pytest.raises((ConfigurationError, PeerError, dist.DistError)) as caught:
        fit(Synchronises(), callbacks=[Slow({1: 0.02})])
    return str(caught.value) if caught.type is ConfigurationError else None


def test_collectives_in_a_training_step_give_the_own_value_or_a_clear_error() -> None:
    """The slower rank may notice that the other one has ended before it comes to the same call."""
    fast, slow = launch(_synchronises)
    assert "all_gather in a training step" in fast
    assert slow in (None, fast)


def _logging() -> Any:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t, _ = fit(LogsEverything(), validation=loader(64, shuffle=False), callbacks=[Slow({1: 0.02})])
    metrics = {k: v.item() for k, v in t.callback_metrics.items() if not k.endswith("_step")}
    return metrics, sum("sync_dist=True" in str(w.message) for w in caught)


def test_epoch_values_are_one_on_all_ranks_and_step_values_never_wait() -> None:
    (metrics_a, warned_a), (metrics_b, _) = launch(_logging)
    assert metrics_a == metrics_b
    assert {"train_loss", "synced", "synced_epoch", "train_acc", "val_acc", "val_loss"} <= set(metrics_a)
    assert metrics_a["synced_epoch"] == pytest.approx(metrics_a["train_loss_epoch"])
    assert warned_a == 1


class LogsInItsOwnOrder(Net):
    """Values of other names, in another order, on each rank; and rank 0 has a progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        names = {"a": 1.0, "b": 100.0}
        for name in sorted(names, reverse=self.global_rank == 1):
            self.log(name, names[name], on_epoch=True, prog_bar=True)
        if self.global_rank == 0:
            self.log("only", 7.0, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        gathered = self.all_gather(torch.tensor(float(self.global_rank)))
        assert gathered.tolist() == [0.0, 1.0, 2.0]
        self.log("at_end", float(self.global_rank))


def _own_order() -> Any:
    t, _ = fit(LogsInItsOwnOrder(), enable_progress_bar=True)
    names = ("a_epoch", "b_epoch", "at_end", "only") if t.global_rank == 0 else ("a_epoch", "b_epoch", "at_end")
    return [t.callback_metrics[name].item() for name in names]


def test_epoch_values_are_reduced_by_name_whatever_the_order_and_whoever_reads_them() -> None:
    results = launch(_own_order, workers=3)
    assert results == [[1.0, 100.0, 1.0, 7.0], [1.0, 100.0, 1.0], [1.0, 100.0, 1.0]]


class CountsCollectives(Callback):
    """Collectives on the default group between the batches of an epoch, by the group's own sequence number."""

    def __init__(self) -> None:
        self.count = 0
        self.last: int | None = None

    def on_train_epoch_start(self, *_: Any) -> None:
        self.last = None

    def on_train_batch_start(self, *_: Any) -> None:
        now = dist.group.WORLD._get_sequence_number_for_group()
        self.count += now - self.last if self.last is not None else 0
        self.last = now


def _count(strategy: str, noisy: bool) -> Any:
    class Noisy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if noisy:
                dist.all_reduce(torch.ones(1))
            return super().training_step(batch, batch_idx)

    counter = CountsCollectives()
    sharing = {"work_sharing": False} if noisy else {}
    chosen = ADPSGDStrategy(**sharing) if strategy == "adpsgd" else strategy
    fit(Noisy(), callbacks=[counter], strategy=chosen, validation=loader(16, shuffle=False))
    return counter.count


def test_a_training_step_makes_no_collective() -> None:
    assert launch(_count, "adpsgd", False) == [0, 0]


def test_the_count_of_collectives_would_notice_one() -> None:
    assert launch(_count, "adpsgd", True) == [14, 14]  # one between each two of 8 batches, two epochs
    assert min(launch(_count, "ddp", False)) > 14


# -- the life of a Trainer ---------------------------------------------------------------------------------------------


def _steps_and_checkpoints(path: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=path, every_n_train_steps=5, save_top_k=-1)
    t, _ = fit(data=loader(160, 4), enable_checkpointing=True, callbacks=[saver, Slow({1: 0.01})], max_steps=12, max_epochs=9)
    return t.global_step, saver.best_model_path, saver.last_model_path


def test_max_steps_and_checkpoints_by_step_count_on_every_worker(tmp_path: Any) -> None:
    a, b = launch(_steps_and_checkpoints, str(tmp_path))
    assert a == b
    assert a[0] == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch=0-step=10.ckpt", "epoch=0-step=5.ckpt"]
