"""Elastic averaging in real fits: what the exchanges keep, whose model is shown, resuming, and the option's momentum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_gossip import ConfigurationError, EAMSGDStrategy
from lightning_gossip.strategies.eamsgd import set_momentum
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes

EPOCHS, BATCHES = 3, 5  # of each of two workers


class Measured(torch.optim.SGD):
    """Sums up what it changes."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.changed: Tensor | float = 0.0

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        if closure is not None:
            with torch.enable_grad():
                closure()
        before = torch.cat([parameter.detach().flatten().double() for parameter in parameters])
        super().step()
        self.changed = self.changed + torch.cat([parameter.detach().flatten().double() for parameter in parameters]) - before


def network(**options: Any) -> Net:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    return Net(lambda model: Measured(model.parameters(), lr=0.2, **options), layers)


class Watched(Callback):
    """The worker's model after each batch and where an epoch begins, and what was validated; rank 0 exchanges first."""

    def __init__(self) -> None:
        self.ends: list[list[float]] = []
        self.begins: list[list[float]] = []
        self.validated: list[list[float]] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if len(self.begins) <= trainer.current_epoch:
            self.begins.append(flat(module).tolist())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1:
            dist.barrier()  # rank 0 has exchanged

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 0:
            dist.barrier()
        dist.barrier()  # rank 1 has
        self.ends.append(flat(module).tolist())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated.append(flat(module).tolist())


def _epochs(strategy: EAMSGDStrategy, path: str, *, resumes: bool = False) -> dict[str, Any]:
    watched, model = Watched(), network(momentum=0.5)
    callbacks: list[Callback] = [watched]
    if not resumes:
        callbacks.append(ModelCheckpoint(dirpath=path, filename="{epoch}", save_top_k=-1))
    t = trainer(strategy=strategy, max_epochs=EPOCHS, callbacks=callbacks)
    start = flat(model).tolist()
    validation = loader(16, 8, shuffle=False)
    t.fit(model, loader(2 * BATCHES * 8, 8, shuffle=False), validation, ckpt_path=f"{path}/epoch=1.ckpt" if resumes else None)
    worker = t.strategy.report.workers[t.global_rank]
    return {
        "start": start,
        "changed": model.optimizers(use_pl_optimizer=False).changed.tolist(),
        "last": watched.ends[-1],
        "model": flat(model).tolist(),
        "begins": watched.begins,
        "ends": watched.ends,
        "validated": watched.validated,
        "exchanges": worker.exchanges,
        "staleness": worker.staleness_max,
        "distance": t.strategy.report.consensus_distance,
    }


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def published() -> EAMSGDStrategy:
    """Two in three steps do without an exchange, and 5 steps of an epoch are no whole number of periods."""
    return EAMSGDStrategy(period=3, alpha=0.3, at_rendezvous="evaluate", checkpoint="replicas", work_sharing=False)


def test_as_published_the_sum_is_kept_the_centre_is_shown_and_a_resumed_fit_goes_on_to_the_bit(tmp_path: Path) -> None:
    a, b = ran = launch(_epochs, published(), str(tmp_path))
    centre = vector(a["model"])
    assert a["model"] == b["model"]
    total = vector(a["last"]) + vector(b["last"]) + centre
    expected = 3 * vector(a["start"]) + vector(a["changed"]) + vector(b["changed"])
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
    assert [each["exchanges"] for each in ran] == [EPOCHS * BATCHES // 3] * 2  # the period goes on over the epochs
    assert [each["staleness"] for each in ran] == [1, 1]
    distances = [float((vector(each["last"]) - centre).square().sum()) for each in ran]
    assert a["distance"] == pytest.approx(sum(distances) / 2, rel=1e-4)
    assert min(distances) > 1e-4
    for each in ran:
        assert each["validated"][-1] == a["validated"][-1] == a["model"]
        for epoch in (1, 2):  # a worker's own model, where it left off
            assert each["begins"][epoch] == each["ends"][epoch * BATCHES - 1]

    resumed = launch(_epochs, published(), str(tmp_path), resumes=True)
    for whole, rest in zip(ran, resumed, strict=True):
        assert whole["ends"][2 * BATCHES :] == rest["ends"]
        assert whole["model"] == rest["model"]


def _adopts(strategy: EAMSGDStrategy, path: str) -> dict[str, Any]:
    results = _epochs(strategy, path)
    path_of_second = f"{path}/epoch=1.ckpt"
    results["tensors"] = torch.load(path_of_second, weights_only=True)["lightning_gossip"]["tensors"]
    return results


def test_by_default_all_and_the_centre_go_on_from_the_mean(tmp_path: Path) -> None:
    a, b = launch(_adopts, EAMSGDStrategy(period=3, alpha=0.3, work_sharing=False), str(tmp_path))
    for epoch in range(EPOCHS):
        last = [torch.tensor(each["ends"][(epoch + 1) * BATCHES - 1]) for each in (a, b)]
        mean = ((last[0] + last[1]) / 2).tolist()
        assert a["validated"][epoch] == b["validated"][epoch] == pytest.approx(mean, abs=1e-6)
        if epoch + 1 < EPOCHS:
            assert a["begins"][epoch + 1] == a["validated"][epoch]
    assert a["exchanges"] == EPOCHS * (BATCHES // 3)  # each epoch begins a period
    assert a["tensors"] == {}


def test_momentum_is_set_in_sgd_and_refused_elsewhere() -> None:
    parameter = [nn.Parameter(torch.zeros(1))]
    sgd = torch.optim.SGD(parameter, lr=0.1, momentum=0.5)
    set_momentum([sgd], 0.9)
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["nesterov"]) == (0.9, True)
    set_momentum([sgd], 0.0)
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["nesterov"]) == (0.0, False)
    for other, named in ((torch.optim.Adam(parameter), "trains with Adam"), (torch.optim.RMSprop(parameter), "RMSprop")):
        with pytest.raises(ConfigurationError, match=named):
            set_momentum([other], 0.9)
    with pytest.raises(ConfigurationError, match=r"dampening=0\.1"):
        set_momentum([torch.optim.SGD(parameter, lr=0.1, momentum=0.5, dampening=0.1)], 0.9)


def _momentum(options: dict[str, Any], strategy: dict[str, Any], make: Any = torch.optim.SGD) -> Any:
    model = network()
    model._make_optimizer = lambda model: make(model.parameters(), lr=0.05, **options)
    t = trainer(strategy=EAMSGDStrategy(**strategy) if strategy else "auto", max_epochs=1)
    try:
        t.fit(model, loader(80, 8, shuffle=False))
    except ConfigurationError as error:
        return str(error)
    return flat(model).tolist()


def _momenta() -> list[Any]:
    return [
        _momentum({}, {"momentum": 0.9}),
        _momentum({"momentum": 0.9, "nesterov": True}, {}),
        _momentum({"momentum": 0.5}, {"momentum": 0.0}),
        _momentum({}, {}),
        _momentum({}, {"momentum": 0.9}, torch.optim.Adam),
        _momentum({"momentum": 0.5, "dampening": 0.1}, {"momentum": 0.9}),
    ]


@pytest.mark.slow
def test_the_option_s_momentum_is_nesterov_s_in_the_optimizer() -> None:
    """Of one worker too, beside plain Lightning with the same optimizer."""
    ((given, nesterov, none, plain, adam, dampened),) = launch(_momenta, workers=1)
    assert given == pytest.approx(nesterov, abs=1e-6)
    assert none == pytest.approx(plain, abs=1e-6)
    assert given != pytest.approx(plain, abs=1e-3)
    assert "for torch.optim.SGD, and this model trains with Adam" in adam
    assert "dampening=0.1" in dampened
