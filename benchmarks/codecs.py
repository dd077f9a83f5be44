"""What does it cost to send fewer bytes, and how near is an exchange to the link?

    python -m benchmarks.codecs        # as root

Two hosts behind a link of limited rate exchange a ResNet-50 (25,610,152 float32 values) in every way that ``wire`` knows, in
turn with a raw transfer of the same 102 MB in both directions; the models differ by a thousandth of a weight, as after a few
steps. CPU time is that of the exchanging thread for writing and reading payloads, measured apart, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster import network
from benchmarks.harness import against, pair_transport, print_table, process_group, run, write_results
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.compression.pairwise import exchange_bytes, make_codec
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.exchange import Exchanger
from lightning_gossip.transport.messages import Kind, Message

NUMEL = 25_610_152
CHUNK = 1 << 20  # elements, as in an exchange
TIMEOUT_S = 120.0


def models(seed: int) -> Tensor:
    """A model near a common one."""
    weights = 0.05 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return weights + 5e-5 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def cpu_times(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds an element to write and to read a payload of a chunk, medians."""
    torch.set_num_threads(1)
    model = models(1)[:CHUNK]
    place, results = slice(0, CHUNK), {}
    for wire in get_args(Wire):
        codec = make_codec(wire, model)
        mine, theirs = (torch.zeros(codec.payload_numel(CHUNK), dtype=codec.payload_dtype) for _ in range(2))
        times: dict[str, list[float]] = {"write": [], "read": []}
        for number in range(rounds + 3):
            codec.room(mine, CHUNK).copy_(model)
            began_s = time.thread_time()
            codec.encode(place, mine)
            written_s = time.thread_time()
            codec.half_difference(place, mine, theirs)
            if number >= 3:
                times["write"].append(written_s - began_s)
                times["read"].append(time.thread_time() - written_s)
        results[wire] = {name: statistics.median(values) / CHUNK for name, values in times.items()}
    return results


@process_group()
def transfers(exchanges: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Seconds of a raw transfer of the model in both directions, and of exchanges, in turn.

    Args:
        exchanges: by name, the wire (float32 if not said) and options of the exchanger.
        rounds: how many; the results are medians.
    """
    peer = 1 - dist.get_rank()
    replica = replica_of([models(1 + dist.get_rank())])
    assert isinstance(replica, Replica)  # in the host's memory
    mine, theirs = torch.randn(NUMEL), torch.zeros(NUMEL)
    transport = pair_transport(TIMEOUT_S)
    sent: dict[str, int] = {"raw": mine.nbytes}

    def raw() -> None:
        works = [dist.irecv(theirs, src=peer), dist.isend(mine, dst=peer)]
        for work in works:
            assert work is not None
            work.wait()

    def exchange(name: str, wire: Wire = "float32", **options: Any) -> Callable[[], None]:
        exchanger, codec = Exchanger(transport, timeout_s=TIMEOUT_S, **options), make_codec(wire, replica.published)

        def run() -> None:
            if peer == 1:  # rank 0 calls and rank 1 answers, as in training
                transport.request(peer, Message(Kind.EXCHANGE), TIMEOUT_S)
            else:
                transport.next_message()
                transport.reply(peer, Message(Kind.ACCEPT))
            sent[name] = exchanger.run(peer, replica, codec).bytes_sent

        return run

    ways = {"raw": raw, **{name: exchange(name, **options) for name, options in exchanges.items()}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + rounds):
        for name, transfer in ways.items():
            dist.barrier()
            began_s = time.perf_counter()
            transfer()
            taken = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number:  # the first round connects
                times[name].append(float(taken))
    transport.close()
    return {"seconds": {name: statistics.median(values) for name, values in times.items()}, "bytes": sent}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What does it cost to send fewer bytes?")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rate-mbit", type=int, default=1000, help="of the link, in Mbit/s")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else 7
    cpu = cpu_times(10 if arguments.quick else 40)
    exchanges = {wire: {"wire": wire} for wire in get_args(Wire)}
    with network(2, rate_mbit=arguments.rate_mbit) as net:
        moved, _ = run(transfers, {"exchanges": exchanges, "rounds": rounds}, hosts=net.hosts, timeout_s=600)
    rows = []
    for wire in get_args(Wire):
        assert moved["bytes"][wire] == exchange_bytes(wire, NUMEL)
        raw_s = moved["seconds"]["raw"] * moved["bytes"][wire] / moved["bytes"]["raw"]
        share = raw_s / moved["seconds"][wire]
        write_ns, read_ns = 1e9 * cpu[wire]["write"], 1e9 * cpu[wire]["read"]
        rows.append(
            (
                wire,
                f"{moved['bytes'][wire] / moved['bytes']['raw']:.4f}",
                f"{moved['seconds'][wire]:.3f}",
                against(share, 0.95) if wire == "float32" else f"{share:.2f}",
                f"{write_ns:.2f} + {read_ns:.2f}",
                f"{(write_ns + read_ns) * NUMEL / moved['bytes'][wire]:.2f}",
            )
        )
    print_table(
        f"Exchanges of {NUMEL:,} values at {arguments.rate_mbit} Mbit/s",
        ("wire", "bytes", "seconds", "of the raw link", "CPU, ns an element", "CPU, ns a byte"),
        rows,
        caption="Of the raw link: the bytes sent, over those that a raw transfer would have sent in the time.",
    )
    path = write_results("codecs", {"rate_mbit": arguments.rate_mbit, "cpu_s_per_element": cpu, **moved})
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
