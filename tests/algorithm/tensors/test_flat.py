from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gossip.algorithm.tensors.flat import FlatModel, chunk_slices, common_dtype, fading, views_like

TENSORS: dict[str, Callable[[], list[Tensor]]] = {
    "plain": lambda: [torch.randn(3, 4), torch.randn(5)],
    "0-dim": lambda: [torch.tensor(1.5), torch.randn(2)],
    "one without elements": lambda: [torch.randn(0, 3), torch.randn(2)],
    "channels_last": lambda: [torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.randn(2)],
    "channels_last_3d": lambda: [torch.randn(2, 3, 4, 5, 2).contiguous(memory_format=torch.channels_last_3d)],
    "transposed": lambda: [torch.randn(3, 4).t()],
    "a side of 1 with an odd stride": lambda: [torch.randn(100)[:3].as_strided((1, 3), (70, 1))],
    "every other column": lambda: [torch.randn(3, 8)[:, ::2], torch.randn(2)],
    "inside another": lambda: [torch.randn(4, 6)[1:3, 2:5]],
    "bfloat16": lambda: [torch.randn(3, 4).bfloat16()],
    "mixed": lambda: [torch.randn(3).bfloat16(), torch.randn(2, 2), torch.randn(4, dtype=torch.float64)],
    "parameters": lambda: list(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).parameters()),
}
SPARSE = ("every other column", "inside another")  # there are elements of others between theirs


def like(x: list[Tensor]) -> list[Tensor]:
    """Zeros of the same types, and strides where they are dense."""
    return [torch.zeros_like(t.detach()) for t in x]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("name", TENSORS)
def test_what_was_read_is_written_back(name: str) -> None:
    x = TENSORS[name]()
    values = [t.detach().clone() for t in x]
    model = FlatModel(x)
    assert model.read(x) is model.flat
    with torch.no_grad():
        for t in x:
            t.zero_()
    model.write(x)
    assert equal(x, values)


@pytest.mark.parametrize("name", TENSORS)
def test_writing_reaches_tensors_of_other_strides_too(name: str) -> None:
    x = TENSORS[name]()
    model = FlatModel(x)
    model.read(x)
    out = [torch.zeros(t.shape, dtype=t.dtype) for t in x]
    model.write(out)
    assert equal(out, [t.detach() for t in x])


@pytest.mark.parametrize("name", TENSORS)
def test_adding_changes_each_tensor_by_its_own_part(name: str) -> None:
    x = TENSORS[name]()
    before = [t.detach().clone() for t in x]
    model = FlatModel(x)
    model.read(x)
    model.add_to(x)
    assert equal(x, [t + t for t in before])
    model.flat.fill_(0.5)
    model.add_to(x)
    assert equal(x, [(t + t) + 0.5 for t in before])


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_stay_where_they_are_and_what_they_are(name: str) -> None:
    x = TENSORS[name]()
    before = [(t.shape, t.stride(), t.dtype, t.data_ptr(), t.requires_grad, t.is_leaf) for t in x]
    model = FlatModel(x)
    where = model.flat.data_ptr()
    model.read(x)
    model.write(x)
    model.add_to(x)
    assert [(t.shape, t.stride(), t.dtype, t.data_ptr(), t.requires_grad, t.is_leaf) for t in x] == before
    assert model.flat.data_ptr() == where
    assert not model.flat.requires_grad


@pytest.mark.parametrize("name", SPARSE)
def test_what_lies_between_the_elements_is_left_alone(name: str) -> None:
    x = TENSORS[name]()
    whole = x[0]._base
    assert whole is not None
    before = whole.clone()
    model = FlatModel(x)
    model.flat.fill_(1.0)
    model.add_to(x)
    changed = torch.zeros_like(whole).as_strided(x[0].shape, x[0].stride(), x[0].storage_offset())
    changed += 1.0
    assert changed._base is not None
    assert torch.equal(whole, before + changed._base)
    model.write(x)
    assert torch.equal(whole, torch.where(changed._base.bool(), 1.0, before))


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in SPARSE])
def test_a_dense_tensor_lies_in_the_vector_as_in_its_own_memory(name: str) -> None:
    x = [t.detach() for t in TENSORS[name]()]
    flat = FlatModel(x).read(x)
    own = [t.as_strided((t.numel(),), (1,)) for t in x]
    assert torch.equal(flat, torch.cat([t.to(flat.dtype) for t in own]))


@pytest.mark.parametrize("room", [0, 1, 3])
@pytest.mark.parametrize("name", TENSORS)
def test_room_lies_at_the_end_and_is_nobodys(name: str, room: int) -> None:
    x = TENSORS[name]()
    numel = sum(t.numel() for t in x)
    model = FlatModel(x, room=room)
    assert model.flat.shape == (numel + room,)
    assert torch.equal(model.flat, torch.zeros_like(model.flat))
    model.flat[numel:] = torch.arange(1.0, room + 1.0)
    model.read(x)
    model.add_to(x)
    model.write(x)
    assert model.flat[numel:].tolist() == [float(k) for k in range(1, room + 1)]
    assert torch.equal(model.flat[:numel], FlatModel(x).read(x))


@pytest.mark.parametrize("only", [1, 2, 3, None])
def test_only_so_many_of_the_first_are_written(only: int | None) -> None:
    x = TENSORS["mixed"]()
    model = FlatModel(x, room=2)
    model.read(x)
    out = like(x)
    model.write(out, only=only)
    count = len(x) if only is None else only
    assert equal(out[:count], x[:count])
    assert all(torch.equal(t, torch.zeros_like(t)) for t in out[count:])


@pytest.mark.parametrize("only", [0, None])
def test_nothing_may_be_written(only: int | None) -> None:
    x = [torch.ones(2)] if only == 0 else []
    FlatModel(x).write(x, only=only)
    assert all(torch.equal(t, torch.ones(2)) for t in x)


def test_another_number_of_tensors_or_another_shape_is_an_error() -> None:
    x = TENSORS["plain"]()
    model = FlatModel(x)
    for wrong in (x[:1], [*x, torch.zeros(1)], [x[0], torch.zeros(6)]):
        for use in (model.read, model.add_to):
            with pytest.raises((RuntimeError, ValueError)):
                use(wrong)


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [
        ([], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.float32, torch.bfloat16], torch.float32),
        ([torch.float32, torch.float64, torch.float16], torch.float64),
    ],
)
def test_the_vector_holds_every_tensors_values(dtypes: list[torch.dtype], common: torch.dtype) -> None:
    x = [torch.zeros(1, dtype=dtype) for dtype in dtypes]
    assert common_dtype(x) == common
    assert FlatModel(x).flat.dtype == common
    assert FlatModel(x, dtype=torch.float64).flat.dtype == torch.float64


def test_a_sum_is_rounded_once_to_the_tensors_own_type() -> None:
    x = [torch.tensor([1.0, 256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.float64)]
    model = FlatModel(x)
    model.flat.copy_(torch.tensor([2.0**-9, 1.5, 2.0**-40], dtype=torch.float64))
    model.add_to(x)
    assert x[0].tolist() == [1.0, 258.0]  # bfloat16 has 8 bits: 257.5 lies between 256 and 258
    assert x[1].tolist() == [1.0 + 2.0**-40]


def test_the_vector_does_not_share_the_tensors_memory() -> None:
    x = [torch.zeros(3)]
    model = FlatModel(x)
    model.read(x)
    x[0] += 1.0
    assert model.flat.tolist() == [0.0] * 3


@st.composite
def layouts(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of any order of their dimensions, some of them cut out of larger ones."""
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
        steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
        order = draw(st.permutations(range(len(shape))))
        whole = torch.randn([side * step for side, step in zip(shape, steps, strict=True)]).to(dtype)
        tensors.append(whole[tuple(slice(None, None, step) for step in steps)].permute(list(order)))
    return tensors


@settings(max_examples=50)
@given(x=layouts(), room=st.integers(0, 3))
def test_the_vector_of_any_tensors_holds_each_element_once(x: list[Tensor], room: int) -> None:
    model = FlatModel(x, room=room)
    for view in views_like(model.flat, x):
        view += 1
    numel = sum(t.numel() for t in x)
    assert model.flat.tolist() == [1.0] * numel + [0.0] * room
    model.read(x)
    out = like(x)
    model.write(out)
    assert equal(out, x)
    model.add_to(out)
    assert equal(out, [t + t for t in x])


@settings(max_examples=50)
@given(numel=st.integers(0, 100), chunk=st.integers(1, 30))
def test_chunks_cover_the_vector_in_order(numel: int, chunk: int) -> None:
    pieces = [list(range(numel))[piece] for piece in chunk_slices(numel, chunk)]
    assert [element for piece in pieces for element in piece] == list(range(numel))
    assert all(len(piece) == chunk for piece in pieces[:-1])
    assert all(0 < len(piece) <= chunk for piece in pieces)


def test_fading_names_the_places_of_the_running_statistics() -> None:
    x = [torch.zeros(2, 3), torch.zeros(4), torch.zeros(0), torch.zeros(5)]
    assert fading(x, None) == []
    assert fading(x, [1.0] * 4) == []
    assert [(f.place, f.share) for f in fading(x, [1.0, 0.9, 1.0, 0.0])] == [(slice(6, 10), 0.9), (slice(10, 15), 0.0)]
    model = FlatModel(x)
    for place, share in fading(x, [1.0, 0.9, 1.0, 0.0]):
        model.flat[place] = share
    model.write(x)
    assert x[1].tolist() == pytest.approx([0.9] * 4)
    with pytest.raises(ValueError, match="zip"):
        fading(x, [1.0])
