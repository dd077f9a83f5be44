"""The parameters of a replicated island as views of flat vectors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.islands.places import Place
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.islands import flat_parameters
from lightning_gossip.strategies.islands.flat_parameters import FlatParameters, FlatStates, share_of
from lightning_gossip.strategies.islands.island_model import ReplicatedModel
from tests.strategies.models import flat as flat_of


def model(seed: int = 0) -> nn.Module:
    """Of 43 float32 elements in two layouts, 3 of float64, and what is frozen."""
    torch.manual_seed(seed)
    made = nn.ModuleDict({"conv": nn.Conv2d(2, 3, (2, 2)), "out": nn.Linear(3, 4), "frozen": nn.Linear(2, 2)})
    made.conv.weight.data = made.conv.weight.data.contiguous(memory_format=torch.channels_last)
    made["frozen"].requires_grad_(False)
    made.register_parameter("scale", nn.Parameter(torch.randn(3, dtype=torch.float64)))
    return made


class Island:
    """The collectives of islands whose ranks are called one after the other: each takes from the others' tensors."""

    def __init__(self, shares: Sequence[Sequence[Tensor]]) -> None:
        self.shares = shares  # of each rank
        self.rank = 0

    def broadcast(self, tensor: Tensor, *, group_src: int, async_op: bool) -> Any:
        if group_src != self.rank:
            tensor.copy_(next(share for share in self.shares[group_src] if share.dtype == tensor.dtype))
        return self

    def all_gather(self, into: Sequence[Tensor], mine: Tensor) -> None:
        for place, shares in zip(into, self.shares, strict=True):
            place.copy_(next(share for share in shares if share.dtype == mine.dtype))

    def wait(self) -> None:
        """All is done already."""


def test_parameters_are_the_same_objects_with_their_strides_in_one_vector_for_each_type() -> None:
    net, plain = model(), model()
    objects = dict(net.named_parameters())
    flat = FlatParameters(net, 2)
    assert flat.names == {"conv.weight", "conv.bias", "out.weight", "out.bias", "scale"}
    for name, parameter in net.named_parameters():
        theirs = plain.get_parameter(name)
        assert parameter is objects[name]
        assert torch.equal(parameter, theirs)
        assert parameter.stride() == theirs.stride()
    shares = [flat.share(index) for index in (0, 1)]
    assert [[share.numel() for share in of] for of in shares] == [[8, 48], [8, 48]]  # of 3, and of 24, 3, 12 and 4 elements
    assert [share.dtype for share in shares[0]] == [torch.float64, torch.float32]
    with torch.no_grad():
        shares[1][1].fill_(1.0)
        shares[0][0].fill_(2.0)
        shares[0][1][22:24].fill_(3.0)
    assert net.out.weight.tolist() == [[1.0] * 3] * 4
    assert net.out.bias.tolist() == [1.0] * 4
    assert net.scale.tolist() == [2.0] * 3
    assert torch.equal(net.conv.bias, plain.conv.bias)
    assert (net.conv.weight != plain.conv.weight).sum() == 2  # its last two of 24 elements


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_parameters_and_shares_begin_where_kernels_read_whole_vectors(dtype: torch.dtype, size: int) -> None:
    """A scalar comes first, as CLIP's logit_scale does, and others have odd numbers of elements."""
    net = nn.Sequential(nn.PReLU(), nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 33)).to(dtype)
    net.register_parameter("scale", nn.Parameter(torch.ones([], dtype=dtype)))
    flat = FlatParameters(net, size)
    ends = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in net.parameters()]
    begins = [p for p, _ in ends] + [share.data_ptr() for index in range(size) for share in flat.share(index)]
    assert [address % 64 for address in begins] == [0] * len(begins)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(ends)))


def test_what_has_other_memory_since_is_taken_back() -> None:
    net = model()
    flat = FlatParameters(net, 2)
    net.out.weight.data = torch.full((4, 3), 5.0)
    with torch.no_grad():
        for index in (0, 1):
            for share in flat.share(index):
                share.mul_(2.0)
    assert net.out.weight.tolist() == [[10.0] * 3] * 4


def test_what_is_handed_round_is_what_parameters_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    flat = FlatParameters(net, 2)
    island = Island([flat.share(0), flat.share(1)])
    monkeypatch.setattr(flat_parameters, "dist", island)
    for parameter in net.parameters():
        parameter.data = torch.full_like(parameter, 5.0)
    flat.hand_round()
    assert all(bool((parameter == 5.0).all()) for parameter in net.parameters())
    assert sorted(torch.cat([share.float() for of in island.shares for share in of]).unique().tolist()) == [0.0, 5.0]


def descend(net: nn.Module, target: float) -> None:
    """A step whose new values are in memory of their own, as of optimizers that keep the old ones to go back to (SAM)."""
    (net(torch.ones(8, 4)) - target).square().mean().backward()
    for parameter in net.parameters():
        parameter.data = parameter.data - 0.05 * parameter.grad  # type: ignore[operator]
    net.zero_grad()


def test_what_others_send_reaches_parameters_that_get_other_memory_at_each_step() -> None:
    """Two islands of one rank with other aims, and an exchange a step: without them they are .9 apart."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
    nets[1].load_state_dict(nets[0].state_dict())
    models = []
    for net in nets:
        flat = FlatParameters(net, 1)
        models.append(ReplicatedModel(net, flat=lambda flat=flat: flat, averaged_buffers=(), place=Place(0, 0), size=1).open())
    ours, theirs = replicas = [Replica(model.tensors) for model in models]
    for _ in range(20):
        for net, of, replica, target in zip(nets, models, replicas, (1.0, -1.0), strict=True):
            descend(net, target)
            replica.push_pull(of.tensors)
        half = 0.5 * (theirs.published - ours.published)
        ours.merge(slice(0, ours.numel), half.clone())
        theirs.merge(slice(0, ours.numel), -half)
    for of, replica in zip(models, replicas, strict=True):
        replica.push_pull(of.tensors)
    apart = float((flat_of(nets[0]) - flat_of(nets[1])).norm())
    assert apart < 0.2
    assert torch.equal(flat_of(nets[0]), ours.published[[0, 1, 2, 3, 16]])  # where the bias begins


def test_complex_parameters_are_refused_by_name() -> None:
    net = nn.Module()
    net.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigurationError, match=r"The parameter phase is of type torch\.complex64"):
        FlatParameters(net, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_shares_that_are_handed_round_make_one_model(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [model(seed) for seed in range(size)]
    flats = [FlatParameters(net, size) for net in nets]
    before = [torch.cat([p.detach().double().flatten() for p in net.parameters() if p.requires_grad]) for net in nets]
    island = Island([flat.share(rank) for rank, flat in enumerate(flats)])
    monkeypatch.setattr(flat_parameters, "dist", island)
    for island.rank, flat in enumerate(flats):
        flat.hand_round()
    after = [torch.cat([p.detach().double().flatten() for p in net.parameters() if p.requires_grad]) for net in nets]
    assert all(torch.equal(after[0], theirs) for theirs in after)
    owners = torch.stack([after[0] == theirs for theirs in before]).double().sum(1)
    assert all(0 < share < len(after[0]) for share in owners)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_put_together_is_cut_again_for_islands_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = FlatParameters(model(), size)
    torch.manual_seed(1)
    shares = [[torch.randn_like(share, dtype=torch.float32) for share in flat.share(rank)] for rank in range(size)]

    class Pieces(Island):
        def all_gather(self, into: Sequence[Tensor], mine: Tensor) -> None:
            number = next(number for number, share in enumerate(self.shares[0]) if share is mine)
            for place, of in zip(into, self.shares, strict=True):
                place.copy_(of[number])

    monkeypatch.setattr(flat_parameters, "dist", Pieces(shares))
    whole = flat.whole(shares[0])
    assert {name: tensor.shape for name, tensor in whole.items()} == {
        name: parameter.shape for name, parameter in model().named_parameters() if not name.startswith("frozen")
    }
    for rank in range(size):
        cut = flat.cut(whole, rank)
        assert cut is not None
        for mine, first in zip(cut, shares[rank], strict=True):
            assert set(mine.tolist()) - {0.0} <= set(first.tolist())  # without what was padded
    other = FlatParameters(model(), 4)  # another island's
    again = [other.cut(whole, rank) for rank in range(4)]
    assert sorted(x for share in again for part in share or [] for x in part.tolist() if x) == sorted(
        x for tensor in whole.values() for x in tensor.flatten().tolist() if x
    )
    assert flat.cut({**whole, "out.bias": torch.zeros(5)}, 0) is None
    assert flat.cut({}, 0) is None


def test_states_of_optimizers_are_handed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [[torch.full((3, 2), float(rank)), torch.tensor(float(rank))] for rank in range(2)]
    ranks = [FlatStates(of, rank, 2) for rank, of in enumerate(states)]
    for rank in ranks:
        rank.read()
        rank.share += 10.0
    island = Island([[rank.share] for rank in ranks])
    monkeypatch.setattr(flat_parameters, "dist", island)
    for island.rank, rank in enumerate(ranks):
        rank.hand_round()
    for of in states:
        assert of[0].flatten().tolist() == [10.0] * 4 + [11.0] * 2
        assert of[1].item() == 11.0


def test_a_share_is_a_slice() -> None:
    assert [share_of(torch.arange(6), index, 3).tolist() for index in range(3)] == [[0, 1], [2, 3], [4, 5]]
