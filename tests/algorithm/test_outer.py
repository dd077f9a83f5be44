"""The outer step: identities with the published algorithms, what random orders of events keep, and the map of its stability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.outer import (
    Outer,
    check_exact,
    check_gossip,
    contraction,
    growth,
    largest_momentum,
    outer_map,
    outer_of,
    warnings_of,
)
from lightning_gossip.algorithm.slow_weights import OuterState, SlowWeights, outer_state
from lightning_gossip.errors import ConfigurationError

D = 7


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- random interleavings --------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """One worker of AD-PSGD, its tensors in two pieces."""

    start: Tensor
    outer: Outer | None
    local_steps: int
    updates: Tensor = field(init=False)  # Σ u since the last outer step
    alone: Tensor = field(init=False)  # the velocity that it would have by itself

    def __post_init__(self) -> None:
        self.x = [self.start[:3].clone(), self.start[3:].clone()]
        self.replica = Replica(self.x)
        self.slow = None if self.outer is None else SlowWeights(self.outer, self.local_steps, OuterState(["a", "b"], self.x))
        self.updates, self.alone = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)

    @property
    def flat(self) -> Tensor:
        return torch.cat(self.x)

    def step(self, update: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what an outer step has added to x, and to φ."""
        self.x[0] += update[:3]
        self.x[1] += update[3:]
        self.updates += update
        nothing = torch.zeros(D, dtype=torch.float64)
        if self.slow is None:
            self.replica.push_pull(self.x)
            return nothing, nothing
        with self.slow.merging(self.x):
            self.replica.push_pull(self.x)
        before, slow_before = self.flat, self.slow.state.slow.clone()
        if not self.slow.step(self.x):
            return nothing, nothing
        moved = self.flat - before
        assert self.outer is not None
        self.alone = self.outer.momentum * self.alone + self.updates
        self.updates = torch.zeros(D, dtype=torch.float64)
        slow_moved = self.slow.state.slow - slow_before
        with self.slow.merging(self.x):
            self.replica.push_pull(self.x)
        return moved, slow_moved

    def pull(self) -> None:
        if self.slow is None:
            self.replica.push_pull(self.x)
            return
        with self.slow.merging(self.x):
            self.replica.push_pull(self.x)

    def take(self, model: Tensor) -> None:
        """All have met, and take the mean."""
        self.replica.published.copy_(model)
        if self.slow is None:
            self.replica.copy_out(self.x)
            return
        with self.slow.merging(self.x):
            self.replica.copy_out(self.x)


def coarse(model: Tensor) -> Tensor:
    return (model * 4.0).round() / 4.0


@dataclass
class Played:
    workers: list[Worker]
    moved: Tensor  # Σ u + Σ o
    slow_moved: Tensor  # Σ of what outer steps have added to φ
    events: dict[str, int]


def play(outer: Outer | None, *, seed: int, events: int = 4000, workers: int = 6) -> Played:
    """Steps, starts and ends of exchanges, partners that die, meetings, in a random order."""
    rng, noise = np.random.default_rng(seed), draw(seed)
    start = torch.randn(D, generator=noise, dtype=torch.float64)
    all_of = [Worker(start, outer, 3 + rank) for rank in range(workers)]
    moved, slow_moved = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    under_way: list[tuple[int, int, Tensor, Tensor]] = []
    seen = dict.fromkeys(("step", "start", "end", "death", "meet"), 0)
    for _ in range(events):
        kind = rng.choice(list(seen), p=[0.5, 0.22, 0.22, 0.05, 0.01])
        seen[kind] += 1
        if kind == "step":
            update = 0.3 * torch.randn(D, generator=noise, dtype=torch.float64)
            change, slow_change = all_of[rng.integers(workers)].step(update)
            moved += update + change
            slow_moved += slow_change
        elif kind == "start":
            busy = {rank for i, j, *_ in under_way for rank in (i, j)}
            free = [rank for rank in range(workers) if rank not in busy]
            if len(free) >= 2:
                i, j = rng.choice(free, 2, replace=False)
                snapshots = [coarse(all_of[rank].replica.published.clone()) for rank in (i, j)]
                under_way.append((i, j, snapshots[0], snapshots[1]))
        elif kind in ("end", "death") and under_way:
            i, j, mine, theirs = under_way.pop(rng.integers(len(under_way)))
            if kind == "end":
                difference = 0.5 * (theirs - mine)
                all_of[i].replica.merge(slice(0, D), difference)
                all_of[j].replica.merge(slice(0, D), -difference)
        elif kind == "meet":
            under_way.clear()
            for worker in all_of:
                worker.pull()
            mean = torch.stack([worker.replica.published for worker in all_of]).mean(0)
            for worker in all_of:
                worker.take(mean)
    return Played(all_of, moved, slow_moved, seen)


FORMS = [Outer(0.8, 0.6, nesterov, momentum_of) for nesterov in (True, False) for momentum_of in ("local", "all")]  # type: ignore[arg-type]
NAMES = [f"{'nesterov' if form.nesterov else 'heavy ball'}, {form.momentum_of}" for form in FORMS]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("outer", FORMS, ids=NAMES)
def test_the_sum_of_models_changes_by_local_updates_and_outer_steps_only(outer: Outer, seed: int) -> None:
    played = play(outer, seed=seed)
    assert all(count > 20 for count in played.events.values())
    total = sum(worker.replica.published for worker in played.workers)
    expected = 6 * play(None, seed=seed, events=0).workers[0].flat + played.moved
    assert (total - expected).abs().max() < 1e-10 * played.moved.abs().max()


@pytest.mark.parametrize("nesterov", [True, False])
def test_local_momentum_sees_nothing_but_the_worker_s_own_progress(nesterov: bool) -> None:
    played = play(Outer(0.8, 0.6, nesterov, "local"), seed=3)
    for worker in played.workers:
        assert worker.slow is not None
        assert worker.alone.abs().max() > 0.1
        assert torch.allclose(worker.slow.state.velocity, worker.alone, rtol=0.0, atol=1e-11)
    for worker in played.workers:
        worker.pull()  # and φ follows
    slow = sum(worker.slow.state.slow for worker in played.workers)  # type: ignore[union-attr]
    expected = 6 * play(None, seed=3, events=0).workers[0].flat + played.slow_moved
    assert (slow - expected).abs().max() < 1e-10 * played.slow_moved.abs().max()


def test_momentum_of_all_sees_more_than_that() -> None:
    played = play(Outer(0.8, 0.6, True, "all"), seed=3)
    assert any(not torch.allclose(w.slow.state.velocity, w.alone, atol=1e-3) for w in played.workers)  # type: ignore[union-attr]


@pytest.mark.parametrize("momentum_of", ["local", "all"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_learning_rate_1_without_momentum_changes_not_a_bit(nesterov: bool, momentum_of: str) -> None:
    outer = Outer(1.0, 0.0, nesterov, momentum_of)  # type: ignore[arg-type]
    with_it, without = play(outer, seed=4), play(None, seed=4)
    for ours, plain in zip(with_it.workers, without.workers, strict=True):
        assert torch.equal(ours.flat, plain.flat)
        assert torch.equal(ours.replica.published, plain.replica.published)


def test_neither_a_zero_s_sign_nor_an_infinity_is_lost_without_momentum() -> None:
    x = [torch.tensor([-0.0, float("inf")])]
    state = OuterState(["x"], [torch.zeros(2)])
    Outer(1.0, 0.0).step(x, state.slow_views, state.velocity_views)
    assert torch.signbit(x[0]).tolist() == [True, False]
    assert x[0].tolist() == [0.0, float("inf")]


def test_a_model_from_others_begins_a_round_of_its_own() -> None:
    x = [torch.ones(2)]
    slow = SlowWeights(Outer(), 2, OuterState(["x"], x))
    for _ in range(3):
        x[0] += 1.0
        slow.step(x)
    assert slow.steps == 1
    assert slow.state.velocity.tolist() == [2.0, 2.0]
    x[0].fill_(9.0)
    slow.begin(x)
    assert (slow.steps, slow.state.slow.tolist(), slow.state.velocity.tolist()) == (0, [9.0, 9.0], [0.0, 0.0])


def test_state_goes_over_by_name_and_shape() -> None:
    a, b, c = torch.ones(2), torch.full((3,), 2.0), torch.full((1,), 3.0)
    state = OuterState(["a", "b"], [a, b])
    state.velocity.copy_(torch.arange(5.0))
    saved = state.state_dict()
    assert set(saved) == {"slow/a", "slow/b", "velocity/a", "velocity/b"}
    now = (["c", "b", "a"], [c, torch.zeros(3), torch.zeros(4)])
    other = outer_state(*now, before=None, restored=saved)
    assert torch.equal(outer_state(*now, before=state, restored={}).velocity, other.velocity)
    assert outer_state(["a", "b"], [a, b], before=state, restored={}) is state
    assert other.slow.tolist() == [3.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]  # a has another shape there
    assert other.velocity.tolist() == [0.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]


def test_half_precision_models_have_their_outer_state_in_float32() -> None:
    x = [torch.ones(4, dtype=torch.bfloat16)]
    slow = SlowWeights(Outer(), 1, OuterState(["x"], x))
    assert slow.state.slow.dtype == slow.state.velocity.dtype == torch.float32
    x[0] += 1.0
    slow.step(x)
    assert (x[0].dtype, x[0].tolist()) == (torch.bfloat16, [2.5] * 4)


def test_a_model_without_parameters_has_outer_steps_all_the_same() -> None:
    slow = SlowWeights(Outer(), 1, OuterState([], []))
    with slow.merging([]):
        pass
    assert slow.step([])


# -- the published algorithms ----------------------------------------------------------------------------------------------


def progress(workers: int, rounds: int, seed: int = 5) -> Tensor:
    """Σ u of each worker in each round."""
    return torch.randn(rounds, workers, D, generator=draw(seed), dtype=torch.float64)


def exact_rounds(outer: Outer, updates: Tensor) -> Tensor:
    """φ after rounds whose merge is the exact mean before the outer step."""
    start = torch.ones(D, dtype=torch.float64)
    state, x = OuterState(["x"], [start]), start.clone()
    for everyones in updates:
        x = (x + everyones).mean(0)
        outer.step([x], state.slow_views, state.velocity_views)
    return x


def test_with_the_exact_mean_it_is_torch_s_nesterov_on_the_mean_of_the_progress() -> None:
    updates = progress(4, 30)
    ours = exact_rounds(Outer(0.7, 0.9, nesterov=True), updates)
    slow = torch.nn.Parameter(torch.ones(D, dtype=torch.float64))
    optimizer = torch.optim.SGD([slow], lr=0.7, momentum=0.9, nesterov=True)
    for everyones in updates:
        models = slow.detach() + everyones
        slow.grad = (slow.detach() - models).mean(0)
        optimizer.step()
    assert (ours - slow.detach()).abs().max() < 1e-13 * ours.abs().max()


def test_with_the_exact_mean_the_heavy_ball_is_slowmo() -> None:
    lr, momentum, inner_lr = 0.8, 0.6, 0.05
    updates = progress(4, 30)
    ours = exact_rounds(Outer(lr, momentum, nesterov=False), updates)
    slow, buffer = torch.ones(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    for everyones in updates:  # SlowMo's algorithm 1, of a constant inner learning rate
        mean = (slow + everyones).mean(0)
        buffer = momentum * buffer + (slow - mean) / inner_lr
        slow = slow - lr * inner_lr * buffer
    assert (ours - slow).abs().max() < 1e-13 * ours.abs().max()


def matchings(workers: int, rounds: int, seed: int = 6) -> list[list[int]]:
    """The partner of each worker in each round."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(rounds):
        order, partner = rng.permutation(workers), [0] * workers
        for a, b in order.reshape(-1, 2):
            partner[a], partner[b] = int(b), int(a)
        made.append(partner)
    return made


def gossip_rounds(outer: Outer, updates: Tensor, partners: list[list[int]], *, merges_first: bool) -> Tensor:
    """All x after rounds with one matching each, before the outer step or at the round's start."""
    workers = updates.shape[1]
    x = [torch.ones(D, dtype=torch.float64) for _ in range(workers)]
    states = [OuterState(["x"], [model]) for model in x]
    for everyones, partner in zip(updates, partners, strict=True):
        for merges in (True, False) if merges_first else (False, True):
            if merges:
                x = [0.5 * (x[i] + x[partner[i]]) for i in range(workers)]
            else:
                x = [model + update for model, update in zip(x, everyones, strict=True)]
        for model, state in zip(x, states, strict=True):
            outer.step([model], state.slow_views, state.velocity_views)
    return torch.stack(x)


def test_with_a_matching_the_heavy_ball_is_noloco() -> None:
    lr, momentum, workers = 0.7, 0.5, 6
    updates, partners = progress(workers, 30), matchings(workers, 30)
    ours = gossip_rounds(Outer(lr, momentum, False, "all"), updates, partners, merges_first=False)
    slow = torch.ones(workers, D, dtype=torch.float64)
    buffer = torch.zeros_like(slow)
    for everyones, partner in zip(updates, partners, strict=True):  # two vectors on the wire: the progress and the slow weights
        pulled = 0.5 * (slow + slow[partner])
        buffer = momentum * buffer + lr * 0.5 * (everyones + everyones[partner]) + lr * (pulled - slow)
        slow = slow + buffer
    assert (ours - slow).abs().max() < 1e-13 * ours.abs().max()


def test_with_the_merge_first_nesterov_of_learning_rate_1_is_gasloc() -> None:
    gamma, workers = 0.5, 6
    updates, partners = progress(workers, 30), matchings(workers, 30)
    ours = gossip_rounds(Outer(1.0, gamma, True, "all"), updates, partners, merges_first=True)
    x = torch.ones(workers, D, dtype=torch.float64)
    before = x
    for everyones, partner in zip(updates, partners, strict=True):
        z = 0.5 * (x + x[partner]) + everyones
        x, before = z + gamma * (z - before), z
    assert (ours - x).abs().max() < 1e-13 * ours.abs().max()


# -- stability -------------------------------------------------------------------------------------------------------------


def exchanged(models: np.ndarray, exchanges: int, rng: np.random.Generator) -> np.ndarray:
    """Models of shape (rounds, n) after so many exchanges of random pairs, one after the other."""
    rows = np.arange(len(models))
    for _ in range(exchanges):
        i = rng.integers(models.shape[1], size=len(models))
        j = (i + rng.integers(1, models.shape[1], size=len(models))) % models.shape[1]
        mean = 0.5 * (models[rows, i] + models[rows, j])
        models[rows, i] = models[rows, j] = mean
    return models


def moments(slow: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    return np.stack([(slow * slow).sum(1), (slow * velocity).sum(1), (velocity * velocity).sum(1)])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.9)])
@pytest.mark.parametrize("exchanges", [4, 12])
def test_the_map_is_the_mean_of_ten_thousand_simulated_rounds(
    exchanges: int, lr: float, momentum: float, nesterov: bool
) -> None:
    n, rounds = 8, 10_000
    rng = np.random.default_rng(exchanges)
    slow, velocity = rng.normal(size=n), rng.normal(size=n)
    slow, velocity = slow - slow.mean(), 0.5 * slow + velocity - velocity.mean()
    velocity -= velocity.mean()
    x = exchanged(np.repeat(slow[None], rounds, 0), exchanges, rng)
    outer = Outer(lr, momentum, nesterov, "all")
    slows, velocities = torch.from_numpy(slow).repeat(rounds, 1), torch.from_numpy(velocity).repeat(rounds, 1)
    outer.step([torch.from_numpy(x)], [slows], [velocities])
    seen = moments(slows.numpy(), velocities.numpy())
    expected = outer_map(outer, contraction(n, 2.0 * exchanges / n)) @ moments(slow[None], velocity[None])[:, 0]
    error = seen.std(1) / np.sqrt(rounds)
    assert (np.abs(seen.mean(1) - expected) < 4.5 * error + 1e-12).all()


@pytest.mark.parametrize(
    ("outer", "exchanges", "expected"),
    [  # simulated apart from this package, with asynchronous exchanges: the table of growth without delay
        (Outer(0.7, 0.5, False, "all"), 1, 0.718),
        (Outer(0.7, 0.5, False, "all"), 3, 0.558),
        (Outer(0.7, 0.9, False, "all"), 1, 1.113),
        (Outer(0.7, 0.9, False, "all"), 3, 0.964),
        (Outer(0.7, 0.9, True, "all"), 1, 0.956),
        (Outer(0.7, 0.9, True, "all"), 3, 0.505),
        (Outer(1.0, 0.5, True, "all"), 1, 0.753),
        (Outer(1.0, 0.8, True, "all"), 1, 1.064),
    ],
)
def test_growth_of_eight_workers(outer: Outer, exchanges: int, expected: float) -> None:
    assert growth(outer, 8, exchanges) == pytest.approx(expected, abs=6e-4)


def simulated_growth(outer: Outer, n: int, exchanges: int, *, rounds: int, copies: int) -> float:
    """Per round, from the second half of the rounds."""
    rng = np.random.default_rng(1)
    slow = torch.from_numpy(rng.normal(size=(copies, n)))
    x, velocity, total = slow.clone(), torch.zeros_like(slow), []
    for _ in range(rounds):
        x = torch.from_numpy(exchanged(x.numpy(), exchanges, rng))
        if outer.follows_merges:
            slow = x.clone()  # no progress of its own: φ has followed every merge
        outer.step([x], [slow], [velocity])
        total.append(float((x - x.mean(1, keepdim=True)).square().mean()))
    half = rounds // 2
    return float((total[-1] / total[half - 1]) ** (1.0 / (rounds - half)))


def test_models_drift_apart_where_the_map_says_so_and_nowhere_under_local() -> None:
    unstable = Outer(0.7, 0.9, False, "all")
    assert simulated_growth(unstable, 8, 4, rounds=40, copies=2000) == pytest.approx(1.113, abs=0.03)
    stable = replace(unstable, momentum_of="local")
    assert simulated_growth(stable, 8, 4, rounds=16, copies=2000) == pytest.approx(1.0 - contraction(8, 1.0), abs=0.03)


TABLE = {  # (n, k): heavy ball with lr 1, .7, .1; Nesterov with lr 1, .7
    (4, 1): (0.735, 0.825, 0.977, 0.839, 1.0),
    (4, 2): (0.874, 0.919, 0.989, 1.0, 1.0),
    (4, 4): (0.974, 0.983, 0.998, 1.0, 1.0),
    (8, 1): (0.687, 0.792, 0.972, 0.744, 0.943),
    (8, 2): (0.819, 0.882, 0.985, 1.0, 1.0),
    (8, 4): (0.944, 0.964, 0.996, 1.0, 1.0),
    (16, 1): (0.670, 0.780, 0.970, 0.714, 0.908),
    (16, 4): (0.928, 0.954, 0.994, 1.0, 1.0),
    (64, 1): (0.659, 0.772, 0.969, 0.697, 0.888),
    (64, 2): (0.781, 0.857, 0.981, 0.956, 1.0),
}


@pytest.mark.parametrize(("n", "exchanges"), TABLE)
def test_the_largest_momentum(n: int, exchanges: int) -> None:
    forms = [(1.0, False), (0.7, False), (0.1, False), (1.0, True), (0.7, True)]
    found = [largest_momentum(Outer(lr, 0.0, nesterov, "all"), n, exchanges) for lr, nesterov in forms]
    assert found == pytest.approx(TABLE[n, exchanges], abs=1.1e-3)


@pytest.mark.parametrize("lr", [1.0, 0.7, 0.4, 0.1])
@pytest.mark.parametrize("nesterov", [True, False])
def test_few_exchanges_allow_a_momentum_of_one_less_half_the_learning_rate(lr: float, nesterov: bool) -> None:
    assert largest_momentum(Outer(lr, 0.0, nesterov, "all"), 8, 0.04) == pytest.approx(1.0 - lr / 2.0, abs=0.02)


# -- refusals --------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"lr": 0.0}, "outer.lr=0.0 is not a number above 0"),
    ({"lr": "fast"}, "outer.lr='fast'"),
    ({"momentum": 1.0}, r"outer.momentum=1.0 is not in \[0, 1\)"),
    ({"momentum": -0.1}, "outer.momentum=-0.1"),
    ({"momentum": float("nan")}, "outer.momentum=nan"),
    ({"nesterov": 1}, "outer.nesterov=1 is not one of True, False"),
    ({"momentum_of": "both"}, "outer.momentum_of='both' is not one of 'auto', 'local', 'all'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_values_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Outer(**options)  # type: ignore[arg-type]


def test_an_unstable_pair_is_refused_with_a_stable_one() -> None:
    unstable = Outer(0.7, 0.9, False, "all")
    with pytest.raises(ConfigurationError, match=r"8 workers.*factor of 1.11.*momentum=0.79 or less, or momentum_of='local'"):
        check_gossip(unstable, 8, 1.0)
    check_gossip(replace(unstable, momentum=0.79), 8, 1.0)
    check_gossip(replace(unstable, momentum_of="local"), 8, 1.0)
    check_gossip(unstable, 8, 3.0)
    check_gossip(unstable, 1, 1.0)
    check_gossip(unstable, 8, 0.0)


def test_a_learning_rate_above_1_is_refused_under_gossip_and_not_with_an_exact_mean() -> None:
    with pytest.raises(ConfigurationError, match=r"outer.lr=1.2; under gossip"):
        check_gossip(Outer(1.2, 0.0), 8, 3.0)
    check_exact(Outer(1.2, 0.0))
    for unstable in (Outer(2.0, 0.0), Outer(1.4, 0.9), Outer(3.0, 0.4, False)):
        with pytest.raises(ConfigurationError, match="the mean itself grows"):
            check_exact(unstable)
    with pytest.raises(ConfigurationError, match="momentum_of='local' with an exact mean"):
        check_exact(Outer(momentum_of="local"))


def test_a_pair_that_needs_fast_links_is_warned_of_and_names_one_that_does_not() -> None:
    (warning,) = warnings_of(Outer(0.7, 0.9, True, "all"))
    assert "momentum=0.64" in warning
    assert warnings_of(Outer(0.7, 0.64, True, "all")) == warnings_of(Outer(0.7, 0.9)) == []


@pytest.mark.parametrize("value", [0.7, "nesterov", [0.7, 0.9]])
def test_what_is_no_outer_step_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="is neither an Outer nor None"):
        outer_of(value)


def test_a_mapping_will_do() -> None:
    assert outer_of({"lr": 0.7, "momentum": 0.9}) == Outer(0.7, 0.9)
    assert outer_of(None) is None
    with pytest.raises(ConfigurationError, match="Outer has no argument 'beta'"):
        outer_of({"beta": 0.9})


def test_any_sequence_of_tensors_will_do() -> None:
    x: Sequence[Tensor] = (torch.ones(2),)  # LiveTensors are no list
    state = OuterState(["x"], x)
    Outer().step(x, tuple(state.slow_views), tuple(state.velocity_views))
    assert x[0].tolist() == [1.0, 1.0]
