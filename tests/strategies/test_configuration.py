from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

import lightning_gossip
from lightning_gossip import (
    AdaptivePeriod,
    ADPSGDStrategy,
    APSGDStrategy,
    ConfigurationError,
    DPSGDStrategy,
    EAMSGDStrategy,
    Outer,
    PeriodicAveragingStrategy,
    PostLocal,
    ProtocolError,
    QSGDStrategy,
)
from lightning_gossip.algorithm import ring
from lightning_gossip.strategies.data.dataloader import plan_of
from lightning_gossip.strategies.lightning.patches import Patches
from lightning_gossip.strategies.state import outer_warnings
from tests.strategies.models import Net, loader, samples


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before any worker is started."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("torch.multiprocessing.start_processes", started)


def fit(model: Any = None, devices: int = 3, **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": True, "enable_progress_bar": False, "max_epochs": 1}
    Trainer(accelerator="cpu", devices=devices, **{"strategy": "adpsgd", **quiet, **options}).fit(model or Net(), loader())


class WithSyncBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.SyncBatchNorm(3))


class OwnSaver(ModelCheckpoint):
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("unknown topology", lambda: ADPSGDStrategy(topology="rnig"), "'rnig'.*ring"),
    ("unknown argument", lambda: ADPSGDStrategy(topolgy="ring"), "no argument 'topolgy'.*Did you mean 'topology'"),
    ("an option of DDP", lambda: ADPSGDStrategy(find_unused_parameters=True), "no argument 'find_unused_parameters'"),
    ("unknown option value", lambda: ADPSGDStrategy(at_rendezvous="mean"), "at_rendezvous='mean' is not one of 'adopt'"),
    ("work sharing", lambda: ADPSGDStrategy(work_sharing="yes"), "work_sharing='yes'"),
    ("unknown roles", lambda: ADPSGDStrategy(roles="both"), "roles='both'"),
    ("negative rate", lambda: ADPSGDStrategy(exchanges_per_step=-1), "exchanges_per_step=-1 .* at least 0"),
    ("never pushes", lambda: ADPSGDStrategy(push_every=0), r"push_every=0; it must be an integer >= 1\. .* push_every=4"),
    ("rate that is no number", lambda: ADPSGDStrategy(exchanges_per_step=float("nan")), "exchanges_per_step=nan"),
    ("time that is not positive", lambda: ADPSGDStrategy(exchange_timeout_s=0), "exchange_timeout_s=0 is not a time.* above 0"),
    ("a timeout that is not positive", lambda: DPSGDStrategy(timeout=-60), "timeout=-60 is not a time"),
    (
        "a timeout that is no number",
        lambda: APSGDStrategy(timeout="60"),
        "timeout=.60. is not a time.*timeout=60, or",
    ),
    ("a timeout without an end", lambda: ADPSGDStrategy(timeout=float("inf")), "timeout=inf"),
    ("a timeout longer than a timedelta", lambda: ADPSGDStrategy(timeout=1e300), "timeout=1e.300"),
    ("a silence that is no number", lambda: ADPSGDStrategy(peer_timeout_s="long"), "peer_timeout_s='long' is not a time"),
    ("half a worker", lambda: ADPSGDStrategy(min_workers=1.5), "min_workers=1.5; it must be an integer"),
    ("odd exponential", lambda: fit(strategy=ADPSGDStrategy(topology="exponential")), "even"),
    ("topology of another size", lambda: fit(strategy=ADPSGDStrategy(topology=ring(4))), "4.*3|3.*4"),
    ("graph in two parts", lambda: fit(devices=4, strategy=ADPSGDStrategy(topology=[(0, 1), (2, 3)])), "falls into 2 parts"),
    ("roles of an odd ring", lambda: fit(strategy=ADPSGDStrategy(roles="bipartite")), "bipartite"),
    ("sync_batchnorm", lambda: fit(sync_batchnorm=True), "SyncBatchNorm"),
    ("SyncBatchNorm", lambda: fit(WithSyncBatchNorm()), "'deep.0'.*SyncBatchNorm"),
    ("validation by time", lambda: fit(val_check_interval=timedelta(minutes=1)), "val_check_interval"),
    (
        "checkpoints by time, of a class of the user's own",
        lambda: fit(callbacks=[OwnSaver(train_time_interval=timedelta(minutes=1))]),
        r"OwnSaver\(train_time_interval.*Use Lightning's ModelCheckpoint",
    ),
    ("period below 1", lambda: PeriodicAveragingStrategy(period=0), "period=0; it must be an integer >= 1"),
    ("period that is no number", lambda: PeriodicAveragingStrategy(period="8"), "period='8'"),
    ("a share of a run without end", lambda: fit(strategy="adaptive_averaging", max_epochs=-1), "max_epochs=-1"),
    ("negative overlap", lambda: PeriodicAveragingStrategy(overlap=-1), "overlap=-1"),
    ("optimizer state", lambda: PeriodicAveragingStrategy(optimizer_state="mean"), "optimizer_state='mean' .*'keep'"),
    ("overlapped reset", lambda: PeriodicAveragingStrategy(overlap=True, optimizer_state="reset"), "reset"),
    ("an outer momentum of 1", lambda: PeriodicAveragingStrategy(outer=Outer(momentum=1.0)), "outer.momentum=1.0 is not in"),
    ("no outer step", lambda: PeriodicAveragingStrategy(outer=0.7), "outer=0.7 is neither an Outer nor None"),
    ("own momenta of one mean", lambda: PeriodicAveragingStrategy(outer=Outer(momentum_of="local")), "with an exact mean"),
    ("a mean that grows", lambda: PeriodicAveragingStrategy(outer=Outer(1.4, 0.9)), "the mean itself grows from lr=1.36 on"),
    ("an outer step above 1", lambda: fit(strategy=ADPSGDStrategy(outer=Outer(1.2))), "outer.lr=1.2; under gossip"),
    (
        "models that would drift apart",
        lambda: fit(
            devices=8,
            strategy=ADPSGDStrategy(local_steps=50, exchanges_per_step=0.02, outer=Outer(0.7, 0.9, False, "all")),
        ),
        r"8 workers and 1 exchanges.*factor of 1.11.*Write momentum=0.79 or less, or momentum_of='local'",
    ),
    ("no local step", lambda: ADPSGDStrategy(local_steps=0), "local_steps=0; it must be an integer >= 1"),
    ("all of the run dense", lambda: ADPSGDStrategy(local_steps=5, dense_share=1.0), "dense_share=1.0 is not a share"),
    ("a dense share without end", lambda: fit(strategy="noloco", max_epochs=-1), "dense_share=0.05 is a share of the run"),
    ("thresholds that cross", lambda: AdaptivePeriod(low=1.3, high=0.7), "low=1.3 and high=0.7"),
    ("a share of more than all", lambda: AdaptivePeriod(sample=1.5), "sample=1.5"),
    ("two ends of the first phase", lambda: PostLocal(after_epochs=1, after_steps=2), "exactly one"),
    ("work sharing in lock-step", lambda: QSGDStrategy(work_sharing=True), "work_sharing=True is not possible"),
    ("levels that do not fit", lambda: QSGDStrategy(bits=4, levels=8), "levels"),
    ("bits", lambda: QSGDStrategy(bits=1), "bits"),
    ("bucket size", lambda: QSGDStrategy(bucket_size=0), "bucket_size"),
    ("D-PSGD in two parts", lambda: fit(devices=4, strategy=DPSGDStrategy(topology=[(0, 1), (2, 3)])), "falls into 2 parts"),
    ("weights", lambda: DPSGDStrategy(weights="equal"), "weights='equal'"),
    ("more active than there are", lambda: fit(strategy=APSGDStrategy(active_workers=4)), "active_workers=4 of 3 workers"),
    ("no active worker", lambda: APSGDStrategy(active_workers=0), "active_workers=0"),
    ("negative staleness", lambda: APSGDStrategy(max_staleness=-1), "max_staleness=-1"),
    ("waiting for nothing", lambda: APSGDStrategy(on_stale="wait"), "needs max_staleness"),
    (
        "a bound that cannot be kept",
        lambda: fit(strategy=APSGDStrategy(on_stale="wait", max_staleness=1)),
        "max_staleness=1 with 3 workers",
    ),
    ("a server outside the job", lambda: fit(strategy=APSGDStrategy(server_rank=3)), "server_rank=3 of 3 workers"),
    ("a centre outside the job", lambda: fit(strategy=EAMSGDStrategy(server_rank=3)), "server_rank=3 of 3 workers"),
    ("too strong a force", lambda: EAMSGDStrategy(alpha=0.6), "alpha=0.6 is not in"),
    ("elastic momentum", lambda: EAMSGDStrategy(momentum=1.0), "momentum=1.0"),
    ("negative threshold", lambda: APSGDStrategy(event_trigger=-1.0), "threshold=-1.0"),
    ("trigger", lambda: APSGDStrategy(event_trigger={"limit": 1}), "EventTrigger has no argument 'limit'"),
]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("action", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_work_is_refused_before_any_process_is_started(action: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        action()


def preflight(strategy: Any) -> None:
    trainer = Trainer(accelerator="cpu", devices=3, strategy=strategy, logger=False, max_epochs=1)
    trainer.strategy.preflight(trainer, Net())  # type: ignore[attr-defined]


def test_what_is_to_be_known_of_outer_steps_is_said_once_and_before_any_process_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outer_warnings, "warning_cache", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy in ("periodic_averaging", "adpsgd"):
            preflight(strategy)
        assert not [str(warning.message) for warning in caught if str(warning.message).startswith("outer:")]
        for _ in range(2):
            preflight(ADPSGDStrategy(outer=Outer(1.0, 0.6, momentum_of="all")))
        preflight("diloco")
    said = [str(warning.message) for warning in caught if str(warning.message).startswith("outer:")]
    assert len(said) == 2
    assert "may let the models drift apart. Write momentum_of='local', or momentum=0.49." in said[0]
    assert "the running statistics of the layer 'network.1'" in said[1]


def test_few_rounds_and_slow_exchanges_are_said_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_warnings, "warning_cache", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer_warnings.warn_of_few_rounds(1000.0, 50)
        outer_warnings.warn_of_slow_exchanges(exchange_s=1.0, step_s=0.1, round_steps=50)
        assert not caught
        for steps in (999.0, 400.0):
            outer_warnings.warn_of_few_rounds(steps, 50)
        for exchange_s in (1.5, 2.0):
            outer_warnings.warn_of_slow_exchanges(exchange_s=exchange_s, step_s=0.1, round_steps=50)
    first, second = (str(warning.message) for warning in caught)
    assert "the run has 19 outer steps, each after 50 local ones; fewer than 20" in first
    assert "an exchange lasts as long as 15 steps of this worker, of 50 between" in second


@pytest.mark.parametrize("kind", [ADPSGDStrategy, APSGDStrategy, DPSGDStrategy, PeriodicAveragingStrategy, QSGDStrategy])
def test_a_timeout_is_given_in_seconds_or_as_a_timedelta(kind: Any) -> None:
    assert kind(timeout=60).timeout_s == kind(timeout=timedelta(minutes=1)).timeout_s == 60.0
    assert kind(timeout=None).timeout_s == 1800.0


def test_objects_of_pytorch_lightning_are_refused_by_name(no_process: None) -> None:
    other = pytest.importorskip("pytorch_lightning")
    lightning_gossip.register()
    with pytest.raises(ConfigurationError, match="pytorch_lightning"):
        other.Trainer(strategy="adpsgd", accelerator="cpu", devices=2)
    with pytest.raises(ConfigurationError, match="pytorch_lightning"):
        fit(callbacks=[other.callbacks.LearningRateMonitor()])
    from pytorch_lightning.plugins.io import TorchCheckpointIO

    if TorchCheckpointIO.__module__.startswith("pytorch_lightning"):
        with pytest.raises(ConfigurationError, match="checkpoint_io"):
            ADPSGDStrategy(checkpoint_io=TorchCheckpointIO())


def test_objects_say_whose_they_are_where_others_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"for Fabric write FabricStrategy\(ADPSGDStrategy"):
        Fabric(strategy=ADPSGDStrategy(), accelerator="cpu", devices=2)


def test_importing_registers_the_names_and_registering_again_changes_nothing() -> None:
    before = set(StrategyRegistry)
    assert {"adpsgd", "adpsgd_spawn", "adpsgd_fork", "adpsgd_notebook"} <= before
    lightning_gossip.register()
    assert set(StrategyRegistry) == before
    assert isinstance(StrategyRegistry.get("adpsgd_fork"), ADPSGDStrategy)
    assert StrategyRegistry.get("adpsgd_fork")._start_method == "fork"


def test_a_strategy_pickles_for_spawned_workers() -> None:
    import pickle

    strategy = pickle.loads(pickle.dumps(ADPSGDStrategy(topology=[(0, 1)], exchanges_per_step=2)))
    assert strategy.topology == ((0, 1),)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 8, 8)}, "sampler of its own"),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(8)), 2, False)}, None),
        ({"batch_size": None}, "batch"),
        ({"sampler": RandomSampler(range(8), replacement=True)}, "sampler of its own"),
        ({"sampler": RandomSampler(range(8), num_samples=4)}, "sampler of its own"),
        ({"shuffle": True, "batch_size": 4}, None),
    ],
)
def test_only_ordinary_loaders_are_handed_out(options: dict[str, Any], reason: str | None) -> None:
    plan = plan_of(DataLoader(samples(8), **options), seed=0)
    assert reason in plan if reason is not None else not isinstance(plan, str)


def test_a_subclass_of_dataloader_keeps_its_behaviour() -> None:
    class Mine(DataLoader[Any]):
        pass

    assert "Mine" in str(plan_of(Mine(samples(8)), seed=0))


def test_patches_are_undone_and_an_unknown_name_is_an_error() -> None:
    class Loop:
        def run(self) -> int:
            return 1

    loop, patches = Loop(), Patches()
    patches.set(loop, "run", lambda: 2)
    patches.set(loop, "run", lambda: 3)
    assert loop.run() == 3
    patches.restore()
    patches.restore()
    assert loop.run() == 1
    assert vars(loop) == {}
    with pytest.raises(ProtocolError, match=r"'gone'.*lightning>=2\.6"):
        patches.set(loop, "gone", None)


@pytest.mark.slow
def test_importing_the_package_imports_no_recipe_library() -> None:
    import subprocess

    code = "import sys, lightning_gossip; print([m for m in ('hydra', 'wandb', 'sklearn', 'simpy') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.strip() == "[]"
