"""What the benchmarks share.

- :func:`run` runs a function on several workers, each a process, on this machine or on hosts of benchmarks/cluster; in it
  :func:`rank` and, if it wants one, :func:`process_group`; of two workers :func:`pair_transport`. :func:`workers` and
  :func:`wait` are its parts.
- :class:`Recorder` and :func:`recorded`: what workers write down while they train, as a table of pandas.
- :func:`trainer` and :func:`repeated`: a quiet Trainer, and the digits over and over.
- :func:`print_table`, :func:`against`, :func:`spread`, :func:`best_rate`, :func:`axes_of` and :func:`write_results`: what a
  benchmark prints and leaves.
"""

from benchmarks.harness.pair import pair_transport
from benchmarks.harness.record import Recorder, recorded
from benchmarks.harness.report import (
    RESULTS,
    ROOT,
    against,
    axes_of,
    best_rate,
    console,
    machine,
    print_table,
    spread,
    write_results,
)
from benchmarks.harness.training import repeated, torchft_manager, trainer
from benchmarks.harness.workers import process_group, rank, run, wait, workers

__all__ = [
    "RESULTS",
    "ROOT",
    "Recorder",
    "against",
    "axes_of",
    "best_rate",
    "console",
    "machine",
    "pair_transport",
    "print_table",
    "process_group",
    "rank",
    "recorded",
    "repeated",
    "run",
    "spread",
    "torchft_manager",
    "trainer",
    "wait",
    "workers",
    "write_results",
]
