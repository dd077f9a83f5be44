"""Fabric's launchers, with one thing before: the strategy checks what it was given while there is only one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers import multiprocessing, subprocess_script
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_gossip.strategies.lightning.launchers import PatientStart, StartedWorkers, next_launch
from lightning_gossip.strategies.lightning.patches import Patches


class FabricSubprocessLauncher(StartedWorkers, _SubprocessScriptLauncher):
    """Runs the user's script once more for each further worker (``start_method="popen"``)."""

    preflight: Callable[[], None]
    survives = False  # whether the others go on when one is killed

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.preflight()
        patches = Patches()
        if self.survives:
            patches.set(subprocess_script, "_launch_process_observer", self.observe)
        try:
            with self.ending_workers():
                return super().launch(function, *args, **kwargs)
        finally:
            patches.restore()


class FabricMultiProcessingLauncher(_MultiProcessingLauncher):
    """Starts the workers by spawn, fork or forkserver."""

    preflight: Callable[[], None]
    survives = False  # whether the others go on when one is killed

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.preflight()
        strategy: Any = self._strategy
        strategy.decentralized.launch = next_launch()
        patches = Patches()
        if self.survives:
            patches.set(multiprocessing, "mp", PatientStart())
        try:
            return super().launch(function, *args, **kwargs)
        finally:
            patches.restore()

    @override
    def _wrapping_function(self, process_idx: int, *arguments: Any) -> None:
        strategy: Any = self._strategy
        try:
            super()._wrapping_function(process_idx, *arguments)
        except BaseException as error:
            strategy.leave(error)
            raise
        strategy.leave(None)
