"""Reproduce the papers' headlines: all of them, or those that are named.

python -m benchmarks.reproduction [name ...]
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module

import torch

from benchmarks.harness import console
from benchmarks.reproduction.report import FOLDER, Report

HEADLINES = {
    "slow_worker": "one slow worker of 16",
    "slow_link": "one slow link of 16 workers",
    "shared_network": "128 workers with ResNet-50's size on shared networks",
    "nodes": "16 nodes of 8 GPUs behind shared cards",
    "pairing": "exchanges a step where the network is slow",
    "speed_up": "linear speed-up of the time to a loss",
    "convergence": "convergence per sample, AD-PSGD against all-reduce",
    "rate": "the rate 1/√K",
    "adaptive": "adaptive against constant period",
    "budget": "averaging early against averaging late",
    "eamsgd": "elastic averaging against gossip and periodic averaging",
    "staleness": "staleness of A-PSGD",
    "poisson": "arrivals at a server beside a Poisson process",
    "schedule": "workers, staleness bound and event threshold of A-PSGD, predicted and simulated",
    "network": "the same of a network, whose loss is not convex",
}
"""Name of the module → what it shows. A new headline is one new file and one row here."""


def main() -> None:
    parser = argparse.ArgumentParser(description="The papers' headlines in the simulator.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(HEADLINES)}; all by default")
    names = parser.parse_args().names or list(HEADLINES)
    unknown = sorted(set(names) - set(HEADLINES))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; the headlines are {', '.join(HEADLINES)}")
    torch.set_num_threads(1)  # the batched products are small
    began_s = time.perf_counter()
    for number, name in enumerate(names, start=1):
        console.print(f"[bold]{number}/{len(names)} {name}[/bold]: {HEADLINES[name]} …")
        headline_s, report = time.perf_counter(), Report(name)
        settings = import_module(f"benchmarks.reproduction.{name}").show(report)
        seconds = time.perf_counter() - headline_s
        report.write(settings, seconds)
        console.print(f"{name}: {seconds:.0f} s; wrote {', '.join([f'{name}.json', *report.written])}\n")
    folder = FOLDER.relative_to(FOLDER.parents[2])
    console.print(f"{len(names)} headlines in {time.perf_counter() - began_s:.0f} s; the files are in {folder}")


if __name__ == "__main__":
    main()
