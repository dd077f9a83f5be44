"""What every strategy must do, whatever its algorithm: one row in CASES, and all of this holds for it.

A worker's start costs more than a small fit, so each module-wide fixture runs what one kind of run can show, and the tests
below state one thing each of what it returned.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from lightning_gossip import (
    ADPSGDStrategy,
    APSGDStrategy,
    ConfigurationError,
    DPSGDStrategy,
    EAMSGDStrategy,
    Outer,
    PeriodicAveragingStrategy,
    QSGDStrategy,
)
from lightning_gossip.callbacks import CollectiveCounter
from lightning_gossip.strategies import STRATEGIES, WITH_ISLANDS, DecentralizedStrategy
from lightning_gossip.strategies.registry import IN_SHARDS
from recipes.digits import DigitsClassifier, DigitsData
from tests.strategies.launch import launch, outcomes
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes

CASES: list[tuple[str, Callable[[], DecentralizedStrategy | str]]] = [
    ("adpsgd", lambda: "adpsgd"),
    ("adpsgd int8", lambda: ADPSGDStrategy(wire="int8", partner_choice="fast_links")),
    ("noloco", lambda: "noloco"),
    ("outer steps", lambda: ADPSGDStrategy(local_steps=4, outer=Outer(0.7, 0.3, momentum_of="all"), exchanges_per_step=1.0)),
    ("dpsgd", lambda: "dpsgd"),
    ("dpsgd not overlapped", lambda: DPSGDStrategy(overlap=False)),
    ("apsgd", lambda: "apsgd"),
    ("apsgd bounded", lambda: APSGDStrategy(max_staleness=8, on_stale="wait", active_workers=3)),
    ("eamsgd", lambda: EAMSGDStrategy(period=2)),
    ("eamsgd as published", lambda: EAMSGDStrategy(period=2, at_rendezvous="evaluate", checkpoint="replicas")),
    ("periodic_averaging", lambda: "periodic_averaging"),
    ("periodic overlapped", lambda: PeriodicAveragingStrategy(period=4, overlap=True, optimizer_state="average")),
    ("periodic int8", lambda: PeriodicAveragingStrategy(period=4, wire="int8")),
    ("adaptive_averaging", lambda: "adaptive_averaging"),
    ("diloco", lambda: "diloco"),
    (
        "outer, overlapped, int8",
        lambda: PeriodicAveragingStrategy(period=3, outer=Outer(0.7, 0.3), overlap=1, wire="int8", optimizer_state="average"),
    ),
    ("qsgd", lambda: QSGDStrategy(bits=8)),
    ("qsgd 4 bits", lambda: QSGDStrategy(bits=4)),
]
# other options of a strategy that is there already: make test-slow
SLOW = {
    "adpsgd int8",
    "apsgd bounded",
    "eamsgd as published",
    "periodic int8",
    "noloco",
    "outer steps",
    "diloco",
    "outer, overlapped, int8",
    "dpsgd not overlapped",
    "periodic overlapped",
    "qsgd 4 bits",
}


def parameters(slow: set[str]) -> list[Any]:
    return [pytest.param(make, id=name, marks=[pytest.mark.slow] if name in slow else []) for name, make in CASES]


# its fits differ from those of "periodic_averaging" by their period only: tests/strategies/test_synchronous.py
PARAMETERS = parameters(SLOW | {"adaptive_averaging"})
VARIANTS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

WORKERS = 3  # an odd ring, and as many as "apsgd bounded" wants active
SAMPLES, BATCH = 120, 8  # 15 batches: 5 a worker, however they are handed out


def name_of(strategy: DecentralizedStrategy | str) -> str:
    return strategy if isinstance(strategy, str) else strategy.name


def class_of(strategy: DecentralizedStrategy | str) -> type[DecentralizedStrategy]:
    return STRATEGIES[name_of(strategy)].cls


def equal_steps(strategy: DecentralizedStrategy | str) -> bool:
    return not class_of(strategy).shares_work


@pytest.fixture(scope="module", params=PARAMETERS)
def strategy(request: pytest.FixtureRequest) -> DecentralizedStrategy | str:
    chosen: DecentralizedStrategy | str = request.param()
    return chosen


def test_every_registered_strategy_is_one_of_the_cases() -> None:
    covered = {name_of(make()) for _, make in CASES}
    assert covered == set(STRATEGIES)
    ours = {name for name in StrategyRegistry.available_strategies() if issubclass_of_ours(StrategyRegistry[name]["strategy"])}
    assert ours == {name + suffix for name in {*covered, *WITH_ISLANDS, *IN_SHARDS} for suffix in VARIANTS}
    for name in covered:
        for suffix, start_method in VARIANTS.items():
            registered = StrategyRegistry.get(name + suffix)
            assert type(registered) is STRATEGIES[name].cls
            assert registered._start_method == start_method
            assert registered.name == name


def issubclass_of_ours(registered: Any) -> bool:
    return isinstance(registered, type) and issubclass(registered, DecentralizedStrategy)


# -- the recipe: four workers learn digits -----------------------------------------------------------------------------

# Measured with seeds 1, 2 and 3: worst of all strategies 0.967 after 6 epochs, 0.947 after 4. It says that training works, not
# that averaging does: so short a run of models that meet at the epochs' ends only gets there too.
RECIPE_EPOCHS, ACCURACY = 4, 0.93


def _recipe(strategy: Any, path: str) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model, data = DigitsClassifier(lr=0.1), DigitsData(batch_size=16)
    counter = CollectiveCounter()
    saver = ModelCheckpoint(dirpath=path, filename="end", every_n_epochs=RECIPE_EPOCHS)
    t = trainer(
        strategy=strategy,
        max_epochs=RECIPE_EPOCHS,
        check_val_every_n_epoch=RECIPE_EPOCHS,
        callbacks=[counter, saver],
    )
    t.fit(model, data)
    logged = {name: value.item() for name, value in t.callback_metrics.items()}
    accuracy = t.test(model, data, verbose=False)[0]["test_acc"]
    return {"logged": logged, "accuracy": accuracy, "collectives": counter.count, "path": saver.best_model_path}


# tests/recipes/test_swept.py has the same of "adpsgd", by the command
@pytest.fixture(scope="module", params=parameters(SLOW | {"adaptive_averaging", "adpsgd"}))
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(_recipe, request.param(), str(tmp_path_factory.mktemp("recipe")), workers=4, timeout_s=120)


def test_four_workers_learn_digits(recipe: Any) -> None:
    assert recipe[0]["accuracy"] >= ACCURACY
    assert len({ran["accuracy"] for ran in recipe}) == 1


def test_training_makes_no_collective_on_the_default_group(recipe: Any) -> None:
    assert [ran["collectives"] for ran in recipe] == [0] * 4


def test_logged_values_are_the_same_on_all_ranks(recipe: Any) -> None:
    logged = [ran["logged"] for ran in recipe]
    assert {"train_loss", "val_loss", "val_acc"} <= set(logged[0])
    assert all(theirs == logged[0] for theirs in logged)


def test_plain_lightning_loads_the_checkpoint_and_validates_to_the_logged_values(recipe: Any) -> None:
    logged, path = recipe[0]["logged"], recipe[0]["path"]
    data = DigitsData(batch_size=16)
    plain = trainer(strategy="auto", devices=1)
    (loaded,) = plain.validate(DigitsClassifier.load_from_checkpoint(path), data, verbose=False)
    (restored,) = plain.validate(DigitsClassifier(), data, ckpt_path=path, verbose=False)
    for name in ("val_loss", "val_acc"):
        assert loaded[name] == pytest.approx(logged[name], rel=1e-5)
        assert restored[name] == loaded[name]


# -- short fits: what users train with ---------------------------------------------------------------------------------

CLIP = 0.2
UNEVEN = 160  # samples: 7 batches a worker, which 3 accumulated ones do not divide


class Clipped(Net):
    """Remembers the norms of the gradients before and after they were clipped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norms: list[tuple[float, float]] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        before = self._norm()
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.norms.append((before, self._norm()))

    def _norm(self) -> float:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


class Infinite(Net):
    """Rank 1's gradients are infinite at some steps, so that its scaler skips them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 and batch_idx in (1, 2, 4) else loss


class Adversaries(Net):
    """Two optimizers by hand: one network makes points, the other tells them from the true ones."""

    def __init__(self) -> None:
        super().__init__(network=nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        true, *_ = batch
        entropy = nn.functional.binary_cross_entropy_with_logits
        made = self.generator(torch.randn(len(true), 4))
        ones, zeros = torch.ones(len(true), 1), torch.zeros(len(true), 1)
        ours: Any = self.optimizers()
        for optimizer, loss in (
            (ours[0], lambda: entropy(self.network(true), ones) + entropy(self.network(made.detach()), zeros)),
            (ours[1], lambda: entropy(self.network(made), ones)),
        ):
            self.toggle_optimizer(optimizer)
            value = loss()
            self.log("train_loss", value, on_step=False, on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        networks = (self.network, self.generator)
        return [torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.5, 0.9)) for network in networks]


def without_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# what is fitted: the model, and options of the Trainer
FITS: dict[str, Callable[[], tuple[Net, dict[str, Any]]]] = {
    "SGD in 32-true": lambda: (Net(sgd), {"precision": "32-true"}),
    "AdamW in bf16-mixed": lambda: (Net(lambda m: torch.optim.AdamW(m.parameters(), lr=0.02)), {"precision": "bf16-mixed"}),
    "Adagrad": lambda: (Net(lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1)), {}),
    "accumulated and clipped": lambda: (
        Clipped(sgd, without_batch_norm()),
        {"accumulate_grad_batches": 3, "gradient_clip_val": CLIP},
    ),
    "16-mixed": lambda: (Infinite(sgd, without_batch_norm()), {"plugins": [scaled()]}),
    "two optimizers": lambda: (Adversaries(), {}),
}
LEARNING = [name for name in FITS if name != "two optimizers"]  # of adversaries, one's loss is the other's gain


class Losses(Callback):
    """The training loss of each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.values.append(float(metrics.get("train_loss_epoch", metrics["train_loss"])))


def _short_fits(strategy: Any) -> dict[str, dict[str, Any]]:
    results = {}
    for name, make in FITS.items():
        seed_everything(1, verbose=False)
        model, options = make()
        losses = Losses()
        t = trainer(strategy=copy.deepcopy(strategy), callbacks=[losses], max_epochs=3, **options)
        try:
            t.fit(model, loader(UNEVEN if name.startswith("accumulated") else SAMPLES, BATCH))
        except Exception as error:
            raise RuntimeError(f"in the fit {name!r}") from error
        results[name] = {
            "losses": losses.values,
            "model": flat(model).tolist(),
            "steps": t.global_step,
            "report": t.strategy.report,
            "norms": getattr(model, "norms", None),
            "scale": t.precision_plugin.scaler.get_scale() if name == "16-mixed" else None,
        }
    return results


@pytest.fixture(scope="module")
def short_fits(strategy: Any) -> list[dict[str, dict[str, Any]]]:
    return launch(_short_fits, strategy, workers=WORKERS, timeout_s=120)


@pytest.mark.parametrize("fitted", FITS)
def test_after_a_fit_the_models_are_finite_and_equal_on_all_ranks(short_fits: Any, fitted: str) -> None:
    models = [ran[fitted]["model"] for ran in short_fits]
    assert all(math.isfinite(value) for value in models[0])
    assert models[0] == models[1] == models[2]


@pytest.mark.parametrize("fitted", LEARNING)
def test_the_loss_falls(short_fits: Any, fitted: str) -> None:
    first, *_, last = short_fits[0][fitted]["losses"]
    assert last < 0.9 * first


def test_accumulated_batches_make_one_step_and_so_do_those_that_are_left(short_fits: Any, strategy: Any) -> None:
    ran = short_fits[0]["accumulated and clipped"]
    steps = [worker.steps for worker in ran["report"].workers]
    if equal_steps(strategy):
        assert steps == [3 * 3] * WORKERS  # 7 batches an epoch: 3 + 3 + 1
        assert ran["steps"] == 9
    else:
        assert sum(worker.samples for worker in ran["report"].workers) == 3 * UNEVEN
        assert ran["steps"] == pytest.approx(sum(steps) / WORKERS, abs=3 * 0.5)


def test_gradients_are_clipped(short_fits: Any) -> None:
    for ran in short_fits:
        norms = ran["accumulated and clipped"]["norms"]
        assert max(before for before, _ in norms) > 1.5 * CLIP
        assert all(after <= CLIP * 1.001 for _, after in norms)


def test_qsgd_clips_the_average_and_needs_no_rendezvous_to_keep_its_models_equal(short_fits: Any, strategy: Any) -> None:
    if class_of(strategy) is not QSGDStrategy:
        assert len({tuple(ran["accumulated and clipped"]["norms"]) for ran in short_fits}) == WORKERS  # each clips its own
        return
    norms = [ran["accumulated and clipped"]["norms"] for ran in short_fits]
    assert norms[0] == norms[1] == norms[2]
    # those without BatchNorm, whose statistics are each worker's
    for fitted in ("accumulated and clipped", "16-mixed", "two optimizers"):
        assert short_fits[0][fitted]["report"].consensus_distance < 1e-10


def test_a_step_that_one_scaler_skips_is_counted_on_all(short_fits: Any, strategy: Any) -> None:
    ran = [theirs["16-mixed"] for theirs in short_fits]
    assert ran[1]["scale"] < 64.0  # some were skipped
    if class_of(strategy) is QSGDStrategy:
        assert ran[0]["scale"] == ran[1]["scale"] == ran[2]["scale"]  # the average is infinite for everybody
    else:
        assert ran[0]["scale"] == ran[2]["scale"] == 64.0
    assert ran[0]["steps"] == ran[1]["steps"] == ran[2]["steps"]
    if equal_steps(strategy):
        assert [worker.steps for worker in ran[0]["report"].workers] == [3 * 5] * WORKERS


def test_all_ranks_have_averaged_equally_often(short_fits: Any, strategy: Any) -> None:
    for fitted in FITS:
        counts = {worker.averagings for worker in short_fits[0][fitted]["report"].workers}
        assert len(counts) == 1
        assert (counts == {None}) == (class_of(strategy) is not PeriodicAveragingStrategy)


# -- the life of a Trainer, and checkpoints ----------------------------------------------------------------------------


def _life(strategy: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    data, held_out = loader(SAMPLES, BATCH), loader(32, BATCH, shuffle=False)
    t = trainer(strategy=strategy, max_epochs=2)
    model, second = Net(), Net()
    t.fit(model, data, held_out)
    logged = {name: t.callback_metrics[name].item() for name in ("val_loss", "val_acc")}
    validated = t.validate(model, held_out, verbose=False)[0]
    tested = t.test(model, held_out, verbose=False)[0]
    predicted = sum(len(batch) for batch in t.predict(model, held_out))
    t.fit_loop.max_epochs = 4
    t.fit(model, data, held_out)
    again = t.current_epoch, t.global_step, flat(model).tolist()
    t.fit_loop.max_epochs = 5
    t.fit(second, data, held_out)
    return {
        "evaluated": (logged, validated, tested),
        "predicted": predicted,
        "again": again,
        "second": (t.current_epoch, t.global_step, flat(second).tolist()),
    }


class Started(Callback):
    """Where a fit begins, and the model it begins with."""

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self.at = (trainer.current_epoch, trainer.global_step)
        self.model = flat(model).tolist()


class Noted(Net):
    """Notes what it has trained on when a checkpoint is made, on every rank."""

    seen_at_save = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen_at_save = len(self.seen)


def _resumes(strategy: Any, path: str) -> dict[str, Any]:
    seed_everything(1, verbose=False)

    def fit(epochs: int, saver: Callback, ckpt_path: str | None = None, min_steps: int | None = None) -> dict[str, Any]:
        started, model = Started(), Noted()
        # min_steps makes shares static, so that rank 0 comes to step 7 in the second epoch
        t = trainer(strategy=copy.deepcopy(strategy), max_epochs=epochs, callbacks=[saver, started], min_steps=min_steps)
        t.fit(model, loader(SAMPLES, BATCH), loader(32, BATCH, shuffle=False), ckpt_path=ckpt_path)
        return {
            "began": started.at,
            "began_with": started.model,
            "ended": (t.current_epoch, t.global_step),
            "ended_with": flat(model).tolist(),
            "seen": model.seen,
            "seen at save": model.seen_at_save,
        }

    def every_epoch() -> ModelCheckpoint:
        return ModelCheckpoint(dirpath=f"{path}/epochs", filename="{epoch}", save_top_k=-1)

    def every_seven_steps() -> ModelCheckpoint:
        return ModelCheckpoint(dirpath=f"{path}/steps", filename="{step}", every_n_train_steps=7, save_top_k=-1)

    return {
        "two": fit(2, every_epoch()),
        "two more": fit(4, every_epoch(), f"{path}/epochs/epoch=1.ckpt"),
        "whole": fit(2, every_seven_steps(), min_steps=1),
        "rest": fit(2, every_seven_steps(), f"{path}/steps/step=7.ckpt", min_steps=1),
    }


def _lives(strategy: Any, path: str) -> dict[str, Any]:
    return {"life": _life(copy.deepcopy(strategy)), **_resumes(strategy, path)}


@pytest.fixture(scope="module")
def lives(strategy: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(_lives, strategy, str(tmp_path_factory.mktemp("lives")), workers=WORKERS, timeout_s=120)


def test_one_strategy_object_fits_validates_tests_predicts_and_fits_again(lives: Any) -> None:
    ran = [theirs["life"] for theirs in lives]
    logged, validated, tested = ran[0]["evaluated"]
    assert logged == validated == tested
    assert sum(theirs["predicted"] for theirs in ran) >= 32  # shares are filled up to equal ones
    assert ran[0]["again"][:2] == (4, 4 * 5)
    assert ran[0]["second"][:2] == (5, 5 * 5)
    for name in ("evaluated", "again", "second"):
        assert ran[0][name] == ran[1][name] == ran[2][name]


def test_a_fit_resumes_after_an_epoch_with_the_saved_model_and_counts_on(lives: Any) -> None:
    for ran in lives:
        assert ran["two"]["ended"] == (2, 2 * 5)
        assert ran["two more"]["began"] == (2, 2 * 5)
        assert ran["two more"]["ended"] == (4, 4 * 5)
        assert ran["two more"]["began_with"] == ran["two"]["ended_with"]
        assert ran["two more"]["ended_with"] == lives[0]["two more"]["ended_with"]
    assert Counter(index for ran in lives for index in ran["two more"]["seen"]) == dict.fromkeys(range(SAMPLES), 2)


def test_a_fit_resumes_inside_an_epoch_with_the_samples_that_are_left(lives: Any, strategy: Any) -> None:
    for ran in lives:
        assert ran["whole"]["ended"] == (2, 2 * 5)
        assert ran["rest"]["began"] == lives[0]["rest"]["began"]
        assert ran["rest"]["began_with"] == lives[0]["rest"]["began_with"]
        assert ran["rest"]["ended"] == lives[0]["rest"]["ended"]
        assert ran["rest"]["ended_with"] == lives[0]["rest"]["ended_with"]
    before = Counter(index for ran in lives for index in ran["whole"]["seen"][5 * BATCH : ran["whole"]["seen at save"]])
    after = Counter(index for ran in lives for index in ran["rest"]["seen"])
    if equal_steps(strategy):
        assert lives[0]["rest"]["began"] == (1, 7)
        assert lives[0]["rest"]["ended"] == (2, 2 * 5)
        assert before + after == Counter(range(SAMPLES))
    else:  # at rank 0's step 7 the others were at steps of their own
        assert set(before + after) == set(range(SAMPLES))
        assert (before + after).total() <= SAMPLES + (WORKERS - 1) * BATCH  # equal shares of what is left


# -- a failure, and one worker -----------------------------------------------------------------------------------------


class Breaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 1:
            raise ArithmeticError("rank 1 breaks in batch 1")
        return super().training_step(batch, batch_idx)


def _breaks(strategy: Any) -> None:
    trainer(strategy=strategy).fit(Breaks(), loader(800, 4))


def test_a_worker_that_raises_ends_all_with_an_error(strategy: Any) -> None:
    began_s = time.monotonic()
    results = outcomes(_breaks, strategy, workers=WORKERS, timeout_s=30)
    assert time.monotonic() - began_s < 30
    assert "rank 1 breaks in batch 1" in results[1][1]
    for rank in (0, 2):
        ok, text = results[rank]
        assert not ok
        assert "PeerError" in text, text


def _alone(strategy: Any) -> None:
    def fit(strategy: Any) -> tuple[Any, Net]:
        seed_everything(1, verbose=False)
        t, model = trainer(strategy=strategy), Net()
        t.fit(model, loader(SAMPLES, BATCH, shuffle=False), loader(32, BATCH, shuffle=False))  # samplers differ in their order
        return t, model

    t, model = fit(strategy)
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gossip")]
    assert t.strategy.report.workers[0].steps == t.global_step == 2 * 15
    plain, reference = fit("auto")
    assert Counter(model.seen) == Counter(reference.seen)
    assert t.callback_metrics.keys() == plain.callback_metrics.keys()
    torch.testing.assert_close(flat(model), flat(reference))


def test_one_worker_trains_plainly_without_group_or_thread(strategy: Any) -> None:
    if isinstance(strategy, APSGDStrategy):  # "bounded"
        with pytest.raises(ConfigurationError, match="active_workers=3 of 1"):
            strategy.check(1)
        strategy = APSGDStrategy(max_staleness=8, on_stale="wait")
    launch(_alone, strategy, workers=1)
