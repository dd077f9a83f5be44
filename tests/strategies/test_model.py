"""Which tensors of a model are shared, whether a step has moved them, what is set aside of them. No collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryPrecisionRecallCurve

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.state.local_model import OwnModel
from lightning_gossip.strategies.state.one_model import assign
from lightning_gossip.strategies.state.shared_tensors import SharedModel, check_averaged_buffers, check_same_tensors
from lightning_gossip.strategies.state.step_watch import StepWatch


class Teacher(nn.Module):
    """A student, a teacher that requires no gradient, statistics, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(2, 2, bias=False)
        self.teacher = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.whole = nn.BatchNorm1d(2, affine=False, momentum=None)
        self.metric = BinaryPrecisionRecallCurve(thresholds=3)
        self.register_buffer("queue", torch.ones(2, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("covariance", torch.eye(2))


STATISTICS = ["norm.running_mean", "norm.running_var"]


def test_what_requires_a_gradient_and_running_statistics_are_shared() -> None:
    model = SharedModel(Teacher()).open()
    assert model.names == ["student.weight", *STATISTICS]
    assert model.parameters == 1
    assert model.retention == [1.0, 0.9, 0.9]
    rest = {place.name: place.has_mean for place in model.rest()}
    assert rest == {
        "teacher.weight": True,
        "norm.num_batches_tracked": False,
        "whole.running_mean": True,  # of all batches: no merge has a weight in it, but there is a mean
        "whole.running_var": True,
        "whole.num_batches_tracked": False,
        "queue": False,
        "pointer": False,
        "covariance": False,
    }


def test_what_was_trained_stays_shared_when_it_is_frozen() -> None:
    module = Teacher()
    model = SharedModel(module).open()
    module.student.requires_grad_(False)
    assert model.open().names == ["student.weight", *STATISTICS]


def test_what_was_found_to_change_is_shared_from_the_next_session_on() -> None:
    model = SharedModel(Teacher()).open()
    layout = model.layout
    model.learn(["teacher.weight"])
    assert "teacher.weight" not in model.names
    assert model.open().names[:2] == ["student.weight", "teacher.weight"]
    assert model.parameters == 2
    assert model.layout != layout
    assert "teacher.weight" not in [place.name for place in model.rest()]


def test_a_teacher_is_not_what_an_optimizer_steps_on() -> None:
    module = Teacher()
    model = SharedModel(module)
    model.learn(["teacher.weight"])
    assert [id(t) for t in model.open().optimized] == [id(module.student.weight)]


def test_buffers_that_the_user_names_are_averages() -> None:
    assert SharedModel(Teacher(), ["cov*"]).open().names == ["student.weight", "covariance", *STATISTICS]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("covarance", "no buffer.*queue, covariance"),
        ("pointer", "pointer only, whose type torch.int64"),
        ("metric.*", "no buffer"),
    ],
)
def test_a_pattern_that_names_no_average_is_refused_with_the_names_that_there_are(pattern: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_averaged_buffers(Teacher(), [pattern])


def put_new_storage(module: Teacher) -> None:
    module.student.weight.data = torch.full((2, 2), 5.0)


def put_new_parameter(module: Teacher) -> None:
    module.student.weight = nn.Parameter(torch.full((2, 2), 5.0))


def put_new_buffer(module: Teacher) -> None:
    module.norm.running_mean = torch.full((2,), 5.0)


@pytest.mark.parametrize("put", [put_new_storage, put_new_parameter, put_new_buffer])
def test_a_tensor_that_is_replaced_in_a_session_is_the_one_that_is_read_and_written(put: Callable[[Teacher], None]) -> None:
    module = Teacher()
    model = SharedModel(module).open()
    put(module)
    tensors = list(model.tensors)
    assert sum(bool((tensor == 5.0).all()) for tensor in tensors) == 1
    with torch.no_grad():
        torch._foreach_add_(tensors, 1.0)
    now = [module.student.weight, module.norm.running_mean]
    assert sum(bool((tensor == 6.0).all()) for tensor in now) == 1


# -- steps ---------------------------------------------------------------------------------------------------------------


def in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1.0)


def of_the_data(p: nn.Parameter) -> None:
    p.data.add_(1.0)


def new_data(p: nn.Parameter) -> None:
    p.data = p.data + 1.0


def fused(p: nn.Parameter) -> None:
    p.grad = torch.ones_like(p)
    torch.optim.Adam([p], fused=True).step()


@pytest.mark.parametrize("change", [in_place, of_the_data, new_data, fused])
def test_each_way_to_change_a_parameter_is_a_step_and_nothing_else_is(change: Callable[[Any], None]) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    watch = StepWatch(lambda: [parameter])
    watch.begin()
    for _ in range(3):
        assert not watch.has_stepped()  # a batch that only accumulates
        change(parameter)
        assert watch.has_stepped()
        parameter.data.mul_(0.5)  # what a pull does
        watch.mark()
    assert not watch.has_stepped()


def test_steps_that_lightning_hears_of_cost_no_look_at_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    watch = StepWatch(lambda: [parameter])
    watch.begin()
    reads: list[int] = []
    monkeypatch.setattr("lightning_gossip.strategies.state.step_watch.fingerprints", lambda tensors: reads.append(1) or [0])
    in_place(parameter)
    watch.mark(heard=True)
    in_place(parameter)
    assert watch.has_stepped()
    watch.mark()
    assert not reads


# -- a worker's own model ------------------------------------------------------------------------------------------------


def test_a_model_set_aside_comes_back_except_where_somebody_has_set_something_else() -> None:
    shared, rest = [torch.ones(2), torch.ones(2)], [torch.full((3,), float("inf"))]
    own = OwnModel()
    own.set_aside(shared, rest)
    for tensor in shared:
        tensor.fill_(2.0)
    assign(rest[0], torch.zeros(5))  # another worker's has grown
    own.is_replaced()
    shared[1].fill_(3.0)  # in on_train_epoch_start
    with own.in_place():
        assert shared[0].tolist() == [1.0, 1.0]
        assert rest[0].tolist() == [float("inf")] * 3
    assert shared[0].tolist() == [2.0, 2.0]
    assert rest[0].tolist() == [0.0] * 5
    own.put_back()
    assert [tensor.tolist() for tensor in shared] == [[1.0, 1.0], [3.0, 3.0]]
    assert rest[0].tolist() == [float("inf")] * 3
    own.put_back()  # there is none any more
    assert shared[0].tolist() == [1.0, 1.0]


def test_a_model_that_is_not_finite_is_not_set_aside() -> None:
    shared = [torch.tensor([float("nan")])]
    own = OwnModel()
    own.set_aside(shared)
    shared[0].fill_(2.0)
    own.is_replaced()
    own.put_back()
    assert shared[0].tolist() == [2.0]


def test_lazy_modules_that_have_seen_no_batch_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ConfigurationError, match=r"0\.bias, 0\.weight of the model have no shape yet.*setup\(\)"):
        check_same_tensors(model, FixedWorkers())
    model(torch.zeros(1, 5))
    check_same_tensors(model, FixedWorkers())
