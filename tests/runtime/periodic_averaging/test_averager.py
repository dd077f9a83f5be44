"""Two launches: one in which all workers live, whose checks share it, and one in which rank 2 dies and rank 1 is late."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gossip.algorithm.compression.error_feedback_mean import mean_bytes
from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.slow_weights import OuterState
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.collectives import Collectives
from lightning_gossip.runtime.periodic_averaging.averager import Averager
from tests.workers import run_processes

WORLD = 3
LATE_S = 0.4
CPU = torch.device("cpu")

OUTER = Outer(0.7, 0.9)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
WIRES: list[MeanWire] = ["bfloat16", "int8"]
MODEL = 2  # of the three tensors; the third is like an optimizer's state
COUNTED = 1  # the second is like a running statistic


def model(rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Three tensors of 12, 24 and 7 elements; the second is channels_last."""
    draw = torch.randn(WORLD, 43, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[rank].to(dtype)
    first, second, third = draw.split([12, 24, 7])
    return [first.reshape(3, 4), second.reshape(1, 2, 4, 3).contiguous(memory_format=torch.channels_last), third.clone()]


def flat(x: list[Tensor]) -> Tensor:
    return torch.cat([t.double().flatten() for t in x])


def in_memory(x: list[Tensor]) -> Tensor:
    """As :func:`flat`, in the order of the memory."""
    return torch.cat([x[0].flatten(), x[1].permute(0, 2, 3, 1).flatten(), x[2]])


def all_models(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([flat(model(rank, dtype)) for rank in range(WORLD)])


def update(rank: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in model(rank)]


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error).__name__, str(error)
    return "none", ""


# -- all live --------------------------------------------------------------------------------------------------------------


def script(rank: int) -> dict[str, Any]:
    timeline = Timeline()
    collectives = Collectives(CPU, 30.0, timeline)
    seen: dict[str, Any] = {}
    replaced(rank, collectives, seen)
    corrected(rank, collectives, seen)
    compressed(rank, collectives, seen)
    outer(rank, collectives, seen)
    in_fragments(rank, collectives, seen)
    counted(rank, collectives, seen)
    misused(rank, collectives, seen)
    late(rank, collectives, timeline, seen)
    collectives.close()
    collectives.close()
    seen["sum after the end"] = error_of(lambda: collectives.sum(torch.zeros(1)))
    seen["gather after the end"] = error_of(lambda: collectives.gather(1))
    # a tensor would travel as a handle, which dies with this process
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in seen.items()}


def replaced(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    for name, dtype in DTYPES.items():
        x = model(rank, dtype)
        averager = Averager(collectives, x, model=MODEL, counted=COUNTED)
        averager.begin()
        seen[f"distance {name}"] = averager.complete()
        averager.replace()
        seen[f"mean {name}"] = [t.float().contiguous().numpy().tobytes() for t in x]
        seen[f"flat mean {name}"] = flat(x)
    integers = [torch.arange(7.0) * (rank + 1), torch.full((2, 2), rank - 1.0)]
    averager = Averager(collectives, integers)
    averager.begin()
    averager.complete()
    averager.replace()
    seen["integers"] = [t.tolist() for t in integers]
    x = model(rank)
    averager = Averager(collectives, x, model=MODEL, counted=COUNTED)
    averager.begin()
    averager.complete()
    averager.replace(model_only=True)
    seen["model only"] = flat(x)
    averager.replace()
    seen["then the rest"] = flat(x)


def corrected(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    """Rank r applies each averaging after r more local steps; several averagings, one after the other."""
    x = model(rank)
    averager = Averager(collectives, x, model=MODEL)
    updates = torch.zeros(43, dtype=torch.float64)
    number = 0

    def step() -> None:
        nonlocal number
        for t, u in zip(x, update(rank, number), strict=True):
            t += u
        updates.add_(flat(update(rank, number)))
        number += 1

    for _ in range(4):
        step()
        averager.begin()
        assert averager._pending
        for _ in range(rank):
            step()
        distance = averager.complete()
        seen.setdefault("distance of the model", distance)  # of the first
        assert not averager._pending
        averager.correct()
    seen["corrected"], seen["updates"], seen["steps"] = flat(x), updates, number

    x = model(rank)
    averager = Averager(collectives, x, model=MODEL, counted=COUNTED, retention=[1.0, 0.9])
    averager.begin()
    for t in x:
        t += rank + 1.0
    averager.complete()
    averager.correct(forward_passes=3)
    seen["faded"] = flat(x)

    x = model(rank)
    averager = Averager(collectives, x)
    averager.begin()
    seen["distance of all"] = averager.complete()
    for t in x:
        t.zero_()  # whatever comes of an averaging that nobody applies, the next one is right
    averager.begin()
    averager.complete()
    averager.replace()
    seen["zeros"] = flat(x)


def compressed(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    for wire in WIRES:
        x = [torch.zeros(4000, dtype=torch.float64)]
        averager = Averager(collectives, x, wire=wire)
        total, before = torch.zeros(4000, dtype=torch.float64), collectives.bytes_sent
        for number in range(5):
            change = torch.randn(4000, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
            x[0] += change
            total += change
            averager.begin()
            if number == 3:  # applied late
                x[0] += 1.0
                total += 1.0
            averager.complete()
            if number < 4:
                averager.correct()
        seen[f"{wire} bytes"] = collectives.bytes_sent - before
        seen[f"{wire} distance before"] = float(torch.linalg.vector_norm(averager._own)) ** 2
        seen[f"{wire} distance"] = averager.settle()
        averager.replace()
        seen[f"{wire} mean"], seen[f"{wire} updates"] = x[0].clone(), total
        assert averager.settle() is not None
        x = [torch.full((4000,), float(rank), dtype=torch.float64)]  # not equal: the first is exact
        averager = Averager(collectives, x, wire=wire)
        assert averager.settle() is None
        averager.begin()
        averager.complete()
        averager.replace()
        seen[f"{wire} first"] = x[0].clone()


def outer(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    """Three rounds, then one that is applied after two steps more; the first of three tensors counts."""
    for name, wire in (("exact", "float32"), ("rounded", "int8")):
        x = [torch.ones_like(t) for t in model(rank)]
        state = OuterState(["first"], x[:COUNTED])
        averager = Averager(collectives, x, model=MODEL, counted=COUNTED, wire=wire)  # type: ignore[arg-type]
        for number in range(4):
            for t, u in zip(x, update(rank, number), strict=True):
                t += u
            averager.begin()
            for t in x if number == 3 else []:
                t += 5.0 + rank
            averager.complete()
            averager.outer_step(OUTER, state)
            if number < 3:
                averager.replace()
                seen[f"outer {name} {number}"] = flat(x)
            else:
                averager.correct()
        seen[f"outer {name} corrected"], seen[f"outer {name} slow"] = flat(x), state.slow


def in_fragments(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    """Three of 43 elements: the second at once, the third late, then all of them."""
    for wire in ("float32", "int8"):
        x = model(rank)
        averager = Averager(collectives, x, model=MODEL, counted=COUNTED, fragments=3, wire=wire)  # type: ignore[arg-type]
        before = collectives.bytes_sent
        averager.begin(1)
        seen[f"fragment bytes {wire}"] = collectives.bytes_sent - before
        averager.complete()
        averager.replace()
        seen[f"fragment at once {wire}"] = in_memory(x)
        averager.begin(2)
        for t in x:
            t += 1.0
        averager.complete()
        averager.correct()
        seen[f"fragment late {wire}"] = in_memory(x)
        averager.begin()
        seen[f"fragments, distance {wire}"] = averager.complete()
        averager.settle()
        averager.replace()
        seen[f"fragments, all {wire}"] = in_memory(x)


def counted(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    del rank
    bytes_sent = []

    def note() -> None:
        bytes_sent.append(collectives.bytes_sent)

    x = [torch.zeros(300), torch.zeros(600, dtype=torch.bfloat16)]
    averager = Averager(collectives, x)
    note()
    averager.begin()
    note()
    averager.complete()
    averager.replace()
    averager.correct()
    note()
    collectives.sum_of(1.0, 2.0, 3.0)
    note()
    collectives.gather_bytes(torch.zeros(50, dtype=torch.uint8))
    note()
    collectives.gather({"any": "thing"})
    note()
    seen["bytes"] = bytes_sent


def misused(rank: int, collectives: Collectives, seen: dict[str, Any]) -> None:
    averager = Averager(collectives, model(rank))
    seen["complete before begin"] = error_of(averager.complete)
    averager.begin()
    seen["begin twice"] = error_of(averager.begin)
    averager.complete()
    seen["complete twice"] = error_of(averager.complete)
    averager.begin()  # and none of it has done harm
    averager.complete()
    averager.replace()
    seen["after misuse"] = flat(averager._tensors)
    seen["sum_of"] = collectives.sum_of(float(rank), 0.1)
    seen["gather"] = collectives.gather({"rank": rank})
    payload = torch.tensor([rank, 255 - rank], dtype=torch.uint8)
    seen["gather_bytes"] = [t.tolist() for t in collectives.gather_bytes(payload)]


def late(rank: int, collectives: Collectives, timeline: Timeline, seen: dict[str, Any]) -> None:
    """Rank 1 computes for longer, once while the others wait for it and once behind their backs."""
    averager = Averager(collectives, model(rank))
    for name in ("waiting", "computing too"):
        collectives.sum_of(0.0)  # all together
        before_s, intervals = collectives.waited_s, len(timeline.intervals())
        if rank == 1:
            time.sleep(LATE_S)
        averager.begin()
        if name == "computing too" and rank != 1:
            time.sleep(2 * LATE_S)
        averager.complete()
        seen[name] = collectives.waited_s - before_s
        recorded = timeline.intervals()[intervals:]
        seen[f"{name}, recorded"] = sum(interval.end_s - interval.start_s for interval in recorded)
        seen[f"{name}, activities"] = {interval.activity for interval in recorded}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = run_processes(script, tmp_path_factory.mktemp("averaging"), world_size=WORLD)
    assert all(isinstance(result, dict) for result in results), results
    return [
        {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in result.items()}
        for result in results
    ]


pytestmark = pytest.mark.processes


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_fragment_is_averaged_and_the_rest_is_left_alone(seen: list[dict[str, Any]], wire: str) -> None:
    parts = [slice(0, 14), slice(14, 28), slice(28, 43)]
    before = torch.stack([in_memory(model(rank)) for rank in range(WORLD)])
    mean = before.mean(0)
    near = 1e-13 if wire == "float32" else 0.1
    for rank, theirs in enumerate(seen):
        at_once, late = theirs[f"fragment at once {wire}"], theirs[f"fragment late {wire}"]
        assert torch.allclose(at_once[parts[1]], mean[parts[1]], atol=near)
        assert torch.equal(at_once[parts[0]], before[rank, parts[0]])
        assert torch.equal(at_once[parts[2]], before[rank, parts[2]])
        assert torch.allclose(late[parts[2]], mean[parts[2]] + 1.0, atol=near)
        assert torch.allclose(late[:28], at_once[:28] + 1.0, rtol=1e-13)
        whole = torch.stack([everyones[f"fragment late {wire}"] for everyones in seen]).mean(0)
        assert torch.allclose(theirs[f"fragments, all {wire}"], whole, atol=1e-12)
        assert torch.equal(theirs[f"fragments, all {wire}"], seen[0][f"fragments, all {wire}"])
    assert seen[0]["fragment bytes float32"] == math.ceil(2 * 2 / 3 * 14 * 8)


def test_an_outer_step_moves_the_mean_of_what_counts_the_same_bits_everywhere(seen: list[dict[str, Any]]) -> None:
    x = torch.ones(WORLD, 43, dtype=torch.float64)
    state = OuterState(["first"], [x[0, :12]])
    for number in range(4):
        x = x + torch.stack([flat(update(rank, number)) for rank in range(WORLD)])
        mean = x.mean(0)
        slow = mean[:12].clone()
        OUTER.step([slow], state.slow_views, state.velocity_views)
        mean[:12] = slow
        if number < 3:
            x = mean.repeat(WORLD, 1)
            assert torch.allclose(seen[0][f"outer exact {number}"], mean, rtol=1e-13)
            for theirs in seen[1:]:
                assert torch.equal(theirs[f"outer exact {number}"], seen[0][f"outer exact {number}"])
                assert torch.equal(theirs[f"outer rounded {number}"], seen[0][f"outer rounded {number}"])
            assert torch.allclose(seen[0][f"outer rounded {number}"], mean, atol=0.1)
    for rank, theirs in enumerate(seen):
        assert torch.allclose(theirs["outer exact corrected"], mean + 5.0 + rank, rtol=1e-13)
        assert torch.allclose(theirs["outer exact slow"], state.slow, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replaced_models_are_the_same_bits_everywhere(seen: list[dict[str, Any]], dtype: str) -> None:
    assert seen[0][f"mean {dtype}"] == seen[1][f"mean {dtype}"] == seen[2][f"mean {dtype}"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_exact_to_one_rounding_of_the_model(seen: list[dict[str, Any]], dtype: str) -> None:
    """And, where numbers of both signs cancel, to the rounding of the vector, which is float32 at least."""
    of_model = torch.finfo(DTYPES[dtype]).eps
    of_vector = min(of_model, torch.finfo(torch.float32).eps)
    models = all_models(DTYPES[dtype])
    difference = (seen[0][f"flat mean {dtype}"] - models.mean(0)).abs()
    assert bool((difference <= 0.5 * of_model * models.mean(0).abs() + of_vector * models.abs().sum(0)).all())


def test_the_mean_of_integers_has_no_error(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert worker["integers"] == [[2.0 * k for k in range(7)], [[0.0, 0.0], [0.0, 0.0]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_completing_returns_the_squared_distance_of_what_counts(seen: list[dict[str, Any]], dtype: str) -> None:
    differences = all_models(DTYPES[dtype]) - all_models(DTYPES[dtype]).mean(0)
    for rank, worker in enumerate(seen):
        expected = float(differences[rank, :12].square().sum())
        assert worker[f"distance {dtype}"] == pytest.approx(expected, rel=1e-12 if dtype == "float64" else 1e-5)


def test_the_model_counts_if_nothing_else_is_said(seen: list[dict[str, Any]]) -> None:
    models = torch.stack([flat(model(rank)) + flat(update(rank, 0)) for rank in range(WORLD)])
    expected = (models - models.mean(0))[:, : 12 + 24].square().sum(1)
    assert [worker["distance of the model"] for worker in seen] == pytest.approx(expected.tolist(), rel=1e-12)


def test_everything_is_the_model_if_nothing_else_is_said(seen: list[dict[str, Any]]) -> None:
    expected = (all_models() - all_models().mean(0)).square().sum(1)
    assert [worker["distance of all"] for worker in seen] == pytest.approx(expected.tolist(), rel=1e-12)


def test_model_only_leaves_what_is_not_the_models(seen: list[dict[str, Any]]) -> None:
    for rank, worker in enumerate(seen):
        assert torch.equal(worker["model only"][36:], flat(model(rank))[36:])
        assert torch.equal(worker["model only"][:36], worker["flat mean float64"][:36])
        assert torch.equal(worker["then the rest"], worker["flat mean float64"])


def test_corrections_change_the_sum_by_the_local_updates_only(seen: list[dict[str, Any]]) -> None:
    assert [worker["steps"] for worker in seen] == [4 * (1 + rank) for rank in range(WORLD)]
    expected = all_models().sum(0) + torch.stack([worker["updates"] for worker in seen]).sum(0)
    total = torch.stack([worker["corrected"] for worker in seen]).sum(0)
    assert torch.allclose(total, expected, rtol=0, atol=1e-13 * float(expected.abs().max()))


def test_a_correction_is_the_mean_less_what_was_sent(seen: list[dict[str, Any]]) -> None:
    """The four averagings once more, in one process."""
    x, number = all_models(), [0] * WORLD

    def step(rank: int) -> None:
        x[rank] += flat(update(rank, number[rank]))
        number[rank] += 1

    for _ in range(4):
        for rank in range(WORLD):
            step(rank)
        sent = x.clone()
        for rank in range(WORLD):
            for _ in range(rank):
                step(rank)
        x += sent.mean(0) - sent
    ours = torch.stack([worker["corrected"] for worker in seen])
    assert torch.allclose(ours, x, rtol=0, atol=1e-13 * float(x.abs().max()))


def test_of_the_correction_of_a_running_statistic_the_forward_passes_leave_a_share(seen: list[dict[str, Any]]) -> None:
    correction = all_models().mean(0) - all_models()
    correction[:, 12:36] *= 0.9**3
    expected = all_models() + torch.arange(1.0, WORLD + 1).unsqueeze(1) + correction
    assert torch.allclose(torch.stack([worker["faded"] for worker in seen]), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("wire", WIRES)
def test_rounded_means_lose_nothing_until_they_are_settled(seen: list[dict[str, Any]], wire: str) -> None:
    total = sum(worker[f"{wire} updates"] for worker in seen)
    for worker in seen:
        assert torch.equal(worker[f"{wire} mean"], seen[0][f"{wire} mean"])
        assert torch.allclose(WORLD * worker[f"{wire} mean"], total, rtol=0.0, atol=1e-12)
        assert worker[f"{wire} distance"] == pytest.approx(worker[f"{wire} distance before"], rel=0.01)
        assert torch.allclose(worker[f"{wire} first"], torch.ones(4000, dtype=torch.float64), rtol=0.0, atol=1e-15)


@pytest.mark.parametrize(("wire", "share"), [("bfloat16", 0.5 / 2), ("int8", 0.25 / 2)])  # of float64
def test_rounded_means_send_as_many_bytes_less(seen: list[dict[str, Any]], wire: MeanWire, share: float) -> None:
    sent = seen[0][f"{wire} bytes"] / 5
    assert sent == 2 * (WORLD - 1) / WORLD * mean_bytes(wire, 4000, WORLD)
    assert sent == pytest.approx(2 * (WORLD - 1) / WORLD * 8 * 4000 * share, rel=0.01)


def test_an_averaging_that_nobody_applies_leaves_no_trace(seen: list[dict[str, Any]]) -> None:
    assert all(torch.equal(worker["zeros"], torch.zeros(43, dtype=torch.float64)) for worker in seen)


def test_a_ring_would_send_the_bytes_that_are_counted(seen: list[dict[str, Any]]) -> None:
    share = 2 * (WORLD - 1) / WORLD
    for worker in seen:
        begun, completed, numbers, gathered, objects = (
            b - a for a, b in zip(worker["bytes"], worker["bytes"][1:], strict=False)
        )
        assert begun == share * (300 + 600) * 4  # in the vector's type
        assert completed == 0
        assert numbers == share * 3 * 8
        assert gathered == (WORLD - 1) * 50
        assert objects == 0


@pytest.mark.parametrize("misuse", ["complete before begin", "begin twice", "complete twice"])
def test_misuse_is_a_protocol_error_and_does_no_harm(seen: list[dict[str, Any]], misuse: str) -> None:
    for worker in seen:
        assert worker[misuse][0] == ProtocolError.__name__, worker[misuse]
        assert torch.equal(worker["after misuse"], seen[0]["flat mean float64"])


def test_collectives_that_were_closed_twice_say_so(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        for use in ("sum after the end", "gather after the end"):
            assert worker[use][0] == ProtocolError.__name__, worker[use]
            assert "closed" in worker[use][1]


def test_numbers_bytes_and_values_are_gathered(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert worker["sum_of"] == [3.0, pytest.approx(0.3, rel=1e-15)]
        assert worker["gather"] == [{"rank": rank} for rank in range(WORLD)]
        assert worker["gather_bytes"] == [[rank, 255 - rank] for rank in range(WORLD)]


def test_seconds_that_the_caller_was_blocked_are_counted_and_recorded(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 2):
        assert seen[rank]["waiting"] >= 0.5 * LATE_S, seen[rank]["waiting"]
    assert seen[1]["waiting"] < 0.75 * LATE_S
    for worker in seen:
        assert worker["waiting, recorded"] == pytest.approx(worker["waiting"], abs=1e-5)
        assert worker["waiting, activities"] == {"wait"}


def test_an_averaging_behind_computing_is_not_waited_for(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 2):
        assert seen[rank]["computing too"] < 0.75 * LATE_S


# -- one dies, one is late -------------------------------------------------------------------------------------------------


def peer_error(use: Callable[[], Any]) -> tuple[str, str | None, float | None] | None:
    try:
        use()
    except PeerError as error:
        return str(error), error.phase, error.seconds
    return None


def mortal(rank: int) -> dict[str, Any]:
    collectives = Collectives(CPU, 20.0, Timeline())
    impatient = Collectives(CPU, 1.0, Timeline())
    averager = Averager(collectives, model(rank))
    averager.begin()
    averager.complete()
    seen: dict[str, Any] = {}
    if rank == 1:
        time.sleep(2.5)
    began_s = time.monotonic()
    seen["late"] = peer_error(lambda: impatient.sum(torch.zeros(5)))
    seen["late after"] = time.monotonic() - began_s
    collectives.gather(rank)  # all are here, and the other group has not suffered
    if rank == 2:
        os._exit(1)
    began_s = time.monotonic()
    seen["an averaging"] = peer_error(lambda: (averager.begin(), averager.complete()))
    seen["the next one"] = peer_error(lambda: collectives.sum(torch.zeros(5)))
    seen["bytes"] = peer_error(lambda: collectives.gather_bytes(torch.zeros(5, dtype=torch.uint8)))
    seen["values"] = peer_error(lambda: collectives.gather(1))
    seen["died after"] = time.monotonic() - began_s
    collectives.close()
    return seen


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("mortal")
    results = run_processes(mortal, folder, world_size=WORLD)
    assert results[2] == "died"
    assert all(isinstance(result, dict) for result in results[:2]), results
    return results[:2]


@pytest.mark.parametrize(
    ("use", "phase"),
    [("an averaging", "all-reduce"), ("the next one", "all-reduce"), ("bytes", "all-gather"), ("values", "values")],
)
def test_a_worker_that_dies_is_a_peer_error_at_the_others(survivors: list[dict[str, Any]], use: str, phase: str) -> None:
    for worker in survivors:
        message, where, seconds = worker[use]
        assert where == phase
        assert 0 <= seconds <= worker["died after"]
        assert "its own log says why" in message


def test_the_death_of_a_worker_is_noticed_long_before_the_timeout(survivors: list[dict[str, Any]]) -> None:
    assert all(worker["died after"] < 10 for worker in survivors)


def test_a_worker_that_does_not_come_in_time_is_a_peer_error(survivors: list[dict[str, Any]]) -> None:
    _, phase, seconds = survivors[0]["late"]
    assert phase == "all-reduce"
    assert 0.5 <= seconds <= survivors[0]["late after"] < 2.4  # another one's deadline may have passed earlier
