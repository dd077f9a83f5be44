"""What a worker writes down while it trains. All workers' clocks are one: the machine's monotonic clock.

Into the folder of the run, by rank:

    steps-<rank>            a line a step: when it ended, samples, bytes that the host has sent so far, processor seconds so far
    models-<rank>           a line a model: when, after how many steps, in which file
    model-<rank>-<number>   its values

A model is written while the emulated device computes, so that it costs no time of training. A run can be stopped at any moment
and what it has written so far counts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.network.workload import shared_values


class Recorder:
    """One worker's.

    Args:
        folder: of the run.
        rank: whose.
        net: is written.
        every: steps between two models.
        interface: of the host, whose bytes are counted.
    """

    def __init__(self, folder: Path, rank: int, net: nn.Module, *, every: int, interface: str) -> None:
        self._folder = folder
        self._rank = rank
        self._net = net
        self._every = every
        self._interface = interface
        self._steps = 0
        self._models = 0

    def begin_step(self) -> None:
        """In a step, before the emulated device's sleep."""
        if self._steps % self._every == 0:
            self.write_model()

    def end_step(self, samples: int) -> None:
        self._steps += 1
        self._note("steps", [time.monotonic(), samples, bytes_sent(self._interface), time.process_time()])

    def write_model(self) -> None:
        """The model as it is now."""
        at_s = time.monotonic()
        name = f"model-{self._rank}-{self._models}"
        torch.cat([value.flatten() for value in shared_values(self._net)]).numpy().tofile(self._folder / name)
        self._note("models", [at_s, self._steps, name])
        self._models += 1

    def _note(self, kind: str, entry: list[object]) -> None:
        with open(self._folder / f"{kind}-{self._rank}", "a") as file:
            file.write(json.dumps(entry) + "\n")


def bytes_sent(interface: str) -> int:
    """By this host through an interface, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0
