"""The transport of AD-PSGD between two workers."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport.endpoint import endpoint
from lightning_gossip.transport.pairwise_groups import Connections, EdgeTransport


def pair_transport(timeout_s: float) -> EdgeTransport:
    """One process's end of a transport as AD-PSGD's workers have it; both call this, once."""
    rank, place = dist.get_rank(), [("", 0)]
    if rank == 0:
        host = endpoint().address
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = [(host, store.port)]
    dist.broadcast_object_list(place)
    if rank != 0:
        store = TCPStore(*place[0], is_master=False)
    connections = Connections(store, another(store, timeout_s=1e6), another(store), another(store))
    transport = EdgeTransport(connections, "pair", rank=rank, world_size=2, timeout_s=timeout_s)
    transport.make_edges([1 - rank])
    return transport
