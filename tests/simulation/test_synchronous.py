from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch

from lightning_gossip.algorithm import AdaptivePeriod, ConstantPeriod, PostLocal, Quantizer
from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.periodic_averaging.period import Observation
from lightning_gossip.algorithm.periodic_averaging.protocol import OptimizerStateRule
from lightning_gossip.algorithm.slow_weights import OuterState
from lightning_gossip.algorithm.topology.generators import make_sequence, ring, star
from lightning_gossip.algorithm.topology.mixing import mixing_matrix
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    DPSGD,
    QSGD,
    SGD,
    AdaptiveAveraging,
    AllReduce,
    Cluster,
    Constant,
    Epochs,
    Exponential,
    Links,
    PeriodicAveraging,
    Quadratic,
    Recording,
    Result,
    Steps,
    Strategy,
    digits,
    mlp,
    simulate,
)

LR = 0.1
SPECTRUM = [0.3, 1.0, 2.0]


def problem(workers: int, noise: float = 0.0) -> Quadratic:
    return Quadratic(SPECTRUM, heterogeneity=1.0, noise=noise, workers=workers)


def learn(strategy: Strategy, workers: int = 4, steps: int = 20, **options: object) -> Result:
    return simulate(
        strategy,
        Cluster(workers, Exponential(1.0)),
        work=Steps(number=steps),
        objective=problem(workers),
        optimizer=SGD(lr=LR),
        **options,  # type: ignore[arg-type]
    )


def gradients(x: torch.Tensor) -> torch.Tensor:
    return problem(len(x)).gradients(x, range(len(x)), [None] * len(x), [])


# -- models, against the recursions written down densely -----------------------------------------------------------------


def test_all_reduce_is_sgd_on_the_mean_gradient() -> None:
    x = torch.ones(3, dtype=torch.float64)
    for _ in range(20):
        x = x - LR * gradients(x.repeat(4, 1)).mean(0)
    result = learn(AllReduce())
    assert torch.allclose(result.models, x.repeat(4, 1), rtol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("topology", [ring(6), star(5)], ids=["ring", "star"])
def test_neighbours_average_by_the_mixing_matrix(topology, overlap: bool) -> None:  # type: ignore[no-untyped-def]
    w = torch.from_numpy(mixing_matrix(topology))
    x = torch.ones(topology.n, 3, dtype=torch.float64)
    for _ in range(20):
        g = gradients(x)
        x = w @ x - LR * g if overlap else w @ (x - LR * g)
    result = learn(DPSGD(topology=topology, overlap=overlap, at_rendezvous="evaluate"), topology.n)
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["base_2", "base_3", "one_peer_exponential"])
def test_neighbours_average_by_the_matrix_of_the_round(name: str, overlap: bool) -> None:
    sequence = make_sequence(name, 6)
    x = torch.ones(6, 3, dtype=torch.float64)
    rounds = 20 if sequence.is_symmetric else 20 + sequence.spread  # the last ones, until all know that all have arrived
    for number in range(rounds):
        w = torch.from_numpy(sequence.matrix(number))
        update = LR * gradients(x) if number < 20 else torch.zeros_like(x)
        x = w @ x - update if overlap else w @ (x - update)
    result = learn(DPSGD(topology=name, overlap=overlap, at_rendezvous="evaluate"), 6)
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]
    sent = sum(len(sequence.row(number, rank)) for number in range(rounds) for rank in range(6))
    assert sum(worker.exchanges for worker in result.workers) == sent
    assert sum(worker.bytes_sent for worker in result.workers) == sent * (3 + 2) * 8


def test_the_rounds_of_a_sequence_begin_anew_with_each_epoch() -> None:
    """Of 5 steps each, on graphs of 4 rounds."""
    sequence = make_sequence("base_2", 6)
    x = torch.ones(6, 3, dtype=torch.float64)
    for number in [*range(5), *range(5)]:
        x = torch.from_numpy(sequence.matrix(number)) @ x - LR * gradients(x)
    result = simulate(
        DPSGD(topology="base_2", at_rendezvous="evaluate"),
        Cluster(6, Constant(1.0)),
        work=Epochs(number=2, batches=30),
        objective=problem(6),
        optimizer=SGD(lr=LR),
    )
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("period", [1, 3, 8])
def test_local_steps_are_averaged_every_period(period: int) -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    for step in range(1, 21):
        x = x - LR * gradients(x)
        if step % period == 0:
            x = x.mean(0).repeat(4, 1)
    result = learn(PeriodicAveraging(period=period, at_rendezvous="evaluate"))
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]
    assert result.averagings == 20 // period


@pytest.mark.parametrize("overlap", [2, True])
def test_an_overlapped_averaging_comes_as_a_difference_later(overlap: bool | int) -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    pending: tuple[int, torch.Tensor] | None = None
    for step in range(1, 21):
        x = x - LR * gradients(x)
        if pending is not None and step == pending[0]:
            x, pending = x + pending[1], None
        if step % 4 == 0:
            pending = step + (4 if overlap is True else overlap), x.mean(0) - x
    if pending is not None:
        x = x + pending[1]
    result = learn(PeriodicAveraging(period=4, overlap=overlap, at_rendezvous="evaluate"))
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("outer", [Outer(0.7, 0.9), Outer(0.8, 0.6, nesterov=False)], ids=["Nesterov", "heavy ball"])
def test_an_outer_step_follows_each_average(outer: Outer, overlap: int) -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    slow = torch.nn.Parameter(x[0].clone())
    outside = torch.optim.SGD([slow], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
    begun = x
    for step in range(1, 21):
        x = x - LR * gradients(x)
        if step % 5 == 0:
            begun = x
        if step > overlap and (step - overlap) % 5 == 0:
            slow.grad = slow.detach() - begun.mean(0)
            outside.step()
            x = x + (slow.detach() - begun)
    result = learn(PeriodicAveraging(period=5, outer=outer, overlap=overlap, at_rendezvous="evaluate"))
    expected = x if not overlap else x + (_last_outer(outside, slow, begun) - begun)
    assert torch.allclose(result.models, expected, rtol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_fragments_are_averaged_one_after_the_other(overlap: int, wire: MeanWire) -> None:
    outer, places = Outer(0.7, 0.9), [slice(0, 1), slice(1, 3)]  # of three elements
    x = torch.ones(4, 3, dtype=torch.float64)
    slow = [torch.nn.Parameter(x[0, place].clone()) for place in places]
    outside = [torch.optim.SGD([part], lr=outer.lr, momentum=outer.momentum, nesterov=True) for part in slow]
    begun: dict[int, tuple[int, torch.Tensor]] = {}
    for step in range(1, 21):
        x = x - LR * gradients(x)
        if step % 6 in (3, 0):
            number = int(step % 6 == 0)
            begun[step] = number, x[:, places[number]].clone()
        if step - overlap in begun:
            number, snapshot = begun.pop(step - overlap)
            slow[number].grad = slow[number].detach() - snapshot.mean(0)
            outside[number].step()
            x[:, places[number]] += slow[number].detach() - snapshot
    strategy = PeriodicAveraging(period=6, outer=outer, overlap=overlap, fragments=2, at_rendezvous="evaluate", wire=wire)
    result = learn(strategy)
    assert torch.allclose(result.models, x, rtol=1e-13 if wire == "float32" else 0.05)  # type: ignore[arg-type]


def test_the_bytes_of_one_averaging_fall_by_the_number_of_fragments() -> None:
    sent = {}
    for fragments in (1, 4):
        strategy = PeriodicAveraging(period=8, fragments=fragments, at_rendezvous="evaluate")
        links = Links(bandwidth=100.0)
        result = simulate(strategy, Cluster(4, Constant(1.0)), work=Steps(number=8), links=links, model_bytes=800)
        sent[fragments] = result.workers[0].bytes_sent, max(worker.wait_s for worker in result.workers)
        assert result.averagings == fragments
    assert sent[4][0] > sent[1][0]  # the fragment whose turn it is when all have arrived comes on top
    assert sent[1][0] == 2 * 1200
    assert sent[4][0] == 2 * 1200 + 300


def _last_outer(outside: torch.optim.SGD, slow: torch.nn.Parameter, begun: torch.Tensor) -> torch.Tensor:
    """The averaging under way at the end of the run is applied there."""
    slow.grad = slow.detach() - begun.mean(0)
    outside.step()
    return slow.detach()


def test_an_outer_step_of_1_without_momentum_changes_not_a_bit() -> None:
    plain, with_it = (learn(PeriodicAveraging(period=4, outer=outer)) for outer in (None, Outer(1.0, 0.0)))
    assert torch.equal(plain.models, with_it.models)  # type: ignore[arg-type]


def test_a_mean_where_all_meet_is_no_end_of_a_round() -> None:
    """Two epochs of 6 steps each with a round of 4: three outer steps, at the steps 4, 8 and 12."""
    x = torch.ones(4, 3, dtype=torch.float64)
    state = OuterState(["x"], [x[0]])
    for step in range(1, 13):
        x = x - LR * gradients(x)
        if step % 4 == 0:
            mean = x.mean(0)
            Outer().step([mean], state.slow_views, state.velocity_views)
            x = mean.repeat(4, 1)
        if step % 6 == 0:
            x = x.mean(0).repeat(4, 1)
    result = simulate(
        PeriodicAveraging(period=4, outer=Outer()),
        Cluster(4, Constant(1.0)),
        work=Epochs(number=2, batches=24),
        objective=problem(4),
        optimizer=SGD(lr=LR),
    )
    assert torch.allclose(result.models, x, rtol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_differences_refer_to_what_an_outer_step_has_made_of_the_mean(wire: MeanWire) -> None:
    """Without noise or spread all workers are equal, so nothing but rounding is between the two runs."""

    def run(wire: MeanWire) -> Result:
        objective = Quadratic([0.3, 1.0, 2.0])
        strategy = PeriodicAveraging(period=5, outer=Outer(), wire=wire)
        return simulate(strategy, Cluster(4, Constant(1.0)), work=Steps(number=40), objective=objective, optimizer=SGD(lr=LR))

    exact, rounded = run("float32").mean, run(wire).mean
    assert exact is not None
    assert rounded is not None
    assert 0.0 < (exact - rounded).abs().max() < 0.02 * exact.abs().max()


def test_quantized_gradients_are_the_quantizer_s() -> None:
    quantizer = Quantizer(bits=3, bucket_size=2)
    generators = [torch.Generator().manual_seed(5 + 1_000_003 * rank) for rank in range(4)]
    x = torch.ones(3, dtype=torch.float64)
    for _ in range(20):
        total = torch.zeros_like(x)
        for gradient, generator in zip(gradients(x.repeat(4, 1)), generators, strict=True):
            total += quantizer.decode(quantizer.encode(gradient, generator), 3, torch.float64)
        x = x - LR * total / 4
    result = learn(QSGD(bits=3, bucket_size=2, seed=5))
    assert torch.allclose(result.models, x.repeat(4, 1), rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("controller", "averagings"),
    [
        (ConstantPeriod(4), 10),
        (PostLocal(4, after_steps=20), 25),
        (AdaptivePeriod(initial=4, warmup_epochs=0, sample=3), None),
    ],
    ids=["constant", "post-local", "adaptive"],
)
def test_the_controllers_decide(controller, averagings: int | None) -> None:  # type: ignore[no-untyped-def]
    result = learn(PeriodicAveraging(period=controller, at_rendezvous="evaluate"), steps=40)
    assert result.averagings is not None
    assert averagings in (None, result.averagings)
    assert 1 < result.averagings <= 40


@pytest.mark.parametrize("overlap", [False, True])
def test_the_controller_is_told_what_the_runtime_tells_it(overlap: bool) -> None:
    """Two epochs: S_k of each averaging at the next step, and not that of the rendezvous."""
    controller = AdaptivePeriod(initial=3, warmup_epochs=1, sample=2, low=1.5, high=3.0)
    x, state = torch.ones(4, 3, dtype=torch.float64), controller.init()
    pending: torch.Tensor | None = None
    deviation, averaged = None, []

    def finish() -> float | None:
        nonlocal x, pending
        if pending is None:
            return None
        difference, pending = pending.mean(0) - pending, None
        x = x + difference
        return float(difference.square().sum()) / 4

    for step in range(1, 41):
        x = x - LR * gradients(x)
        average_now, state = controller.update(state, Observation(step, (step - 1) // 20, step / 40, deviation, LR))
        deviation = None
        if average_now:
            deviation = finish()
            averaged.append(step)
            pending = x.clone()
            deviation = deviation if overlap else finish()
        if step % 20 == 0:
            deviation = finish() if overlap else deviation
            x, state = x.mean(0).repeat(4, 1), replace(state, since=0)
    result = simulate(
        PeriodicAveraging(period=controller, overlap=overlap),
        Cluster(4, Constant(1.0)),
        work=Epochs(number=2, batches=80),
        objective=problem(4),
        optimizer=SGD(lr=LR),
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    ours = [round(event.time_s) for event in result.trace if event.kind == "average"]
    assert sorted([*averaged, 20, 40]) == ours
    assert len({later - earlier for earlier, later in itertools.pairwise(averaged)}) > 2  # the period has adapted
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]


def test_the_adaptive_period_averages_more_often_where_the_learning_rate_is_large() -> None:
    """Noise alone: C₂ is frozen at the large rate, and where the rate is a tenth the period may be longer."""
    result = simulate(
        AdaptiveAveraging(period=AdaptivePeriod(warmup_epochs=0)),
        Cluster(8, Constant(1.0)),
        work=Steps(number=2000),
        objective=Quadratic([0.5] * 20, noise=1.0, start_at=0.0),
        optimizer=SGD(lr=0.1, milestones=(0.4,)),
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    times_s = [event.time_s for event in result.trace if event.kind == "average"]
    early, late = sum(at_s <= 800 for at_s in times_s) / 800, sum(at_s > 1600 for at_s in times_s) / 400
    assert early > 2.5 * late


def test_momentum_is_kept_averaged_or_reset() -> None:
    finals = {}
    for rule in ("keep", "average", "reset"):
        result = simulate(
            PeriodicAveraging(period=4, optimizer_state=rule),
            Cluster(4, Constant(1.0)),
            work=Steps(number=20),
            objective=problem(4),
            optimizer=SGD(lr=LR, momentum=0.9),
        )
        finals[rule] = result.mean
    assert torch.allclose(finals["keep"], finals["average"])  # type: ignore[arg-type]  # linear: their means agree
    assert not torch.allclose(finals["keep"], finals["reset"])  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [0, 2])
def test_averaged_momentum_moves_with_the_models_as_a_difference(overlap: int) -> None:
    x, v = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    begun: dict[int, torch.Tensor] = {}
    for step in range(1, 20):
        v = 0.9 * v + gradients(x)
        x = x - LR * v
        if step % 4 == 0:
            begun[step] = torch.stack([x, v])
        if step - overlap in begun:
            models = begun.pop(step - overlap)
            differences = models.mean(1, keepdim=True) - models
            x, v = x + differences[0], v + differences[1]
    result = simulate(
        PeriodicAveraging(period=4, overlap=overlap, optimizer_state="average", at_rendezvous="evaluate"),
        Cluster(4, Constant(1.0)),
        work=Steps(number=19),
        objective=problem(4),
        optimizer=SGD(lr=LR, momentum=0.9),
    )
    assert torch.allclose(result.models, x, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_averaged_momentum_takes_as_many_bytes_as_the_model_and_as_long(wire: MeanWire) -> None:
    def sent(rule: OptimizerStateRule, momentum: float) -> tuple[float, float]:
        """Of four averagings, the first ones left out: what they refer to is sent as it is."""
        bytes_sent, times_s = [], []
        for steps in (8, 24):
            result = simulate(
                PeriodicAveraging(period=4, optimizer_state=rule, wire=wire, at_rendezvous="evaluate"),
                Cluster(4, Constant(1.0)),
                work=Steps(number=steps),
                objective=mlp(digits(), hidden=32),
                optimizer=SGD(lr=LR, momentum=momentum),
                links=Links(bandwidth=1e6),
            )
            bytes_sent.append(result.workers[0].bytes_sent)
            times_s.append(result.time_s - steps)
        return bytes_sent[1] - bytes_sent[0], times_s[1] - times_s[0]

    kept, averaged = sent("keep", 0.9), sent("average", 0.9)
    assert averaged == pytest.approx((2.0 * kept[0], 2.0 * kept[1]), rel=0.01)
    assert sent("average", 0.0) == pytest.approx(kept)


@pytest.mark.parametrize("name", ["adpsgd", "dpsgd", "apsgd", "periodic_averaging", "adaptive_averaging", "qsgd", "ddp"])
def test_every_strategy_learns_the_digits(name: str) -> None:
    result = simulate(
        name,
        Cluster(4, Exponential(1.0)),
        work=Epochs(number=4, batch_size=16),
        objective=mlp(digits(), hidden=32),
        optimizer=SGD(lr=0.2),
        links=Links(latency_s=0.01, bandwidth=1e6),
    )
    assert result.ended == "done"
    assert result.points[-1].accuracy is not None
    assert result.points[-1].accuracy > 0.8
    assert len(result.epoch_times_s) == 4
    assert set(result.summary()) >= {"strategy", "topology", "world_size", "epochs", "test_acc", "train_s", "workers"}


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: AllReduce(overlap="yes"), "overlap"),  # type: ignore[arg-type]
        (lambda: QSGD(bits=1), "bits"),
        (lambda: DPSGD(weights="equal"), "weights"),  # type: ignore[arg-type]
        (lambda: DPSGD(at_rendezvous="never"), "at_rendezvous"),  # type: ignore[arg-type]
        (lambda: PeriodicAveraging(period=0), "period"),
        (lambda: PeriodicAveraging(overlap=-1), "overlap"),
        (lambda: PeriodicAveraging(overlap=True, optimizer_state="reset"), "reset"),
        (lambda: simulate(DPSGD(topology="hypercube"), Cluster(6, Constant(1.0)), work=Steps(number=1)), "hypercube"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=key):
        make()


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("at_rendezvous", ["adopt", "evaluate"])
def test_averaging_in_fewer_bytes_comes_to_the_same_mean(wire: MeanWire, at_rendezvous: Literal["adopt", "evaluate"]) -> None:
    def run(wire: MeanWire) -> Result:
        return simulate(
            PeriodicAveraging(period=4, wire=wire, at_rendezvous=at_rendezvous),
            Cluster(4, Constant(1.0)),
            links=Links(bandwidth=1000.0),
            work=Steps(number=40),
            objective=Quadratic([0.1 + i / 500 for i in range(500)], heterogeneity=1.0, workers=4),
            optimizer=SGD(lr=0.1),
            seed=1,
        )

    exact, rounded = run("float32"), run(wire)
    assert rounded.mean is not None
    assert exact.mean is not None
    assert torch.allclose(rounded.mean, exact.mean, rtol=0.0, atol=5e-3)  # models move by 0.3 at first
    assert rounded.time_s < exact.time_s
    sent, before = rounded.workers[0].bytes_sent, exact.workers[0].bytes_sent
    assert sent < 0.75 * before
