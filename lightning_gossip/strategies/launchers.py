"""Lightning's launchers, with one thing before: the strategy checks what it was given while there is only one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

_STOPPED = "stopped by SIGTERM"
Preflight = Callable[[pl.Trainer, pl.LightningModule], None]


class CheckedSubprocessLauncher(_SubprocessScriptLauncher):
    """Runs the user's script once more for each further worker (``start_method="popen"``)."""

    preflight: Preflight

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _check(self.preflight, function, args, trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class CheckedMultiProcessingLauncher(_MultiProcessingLauncher):
    """Starts the workers by spawn, fork or forkserver, and brings rank 0's report back to the user's process.

    A worker that is stopped by SIGTERM ends with status 0 and has no result; Lightning's launcher would wait for that for ever.
    Here the workers call the callbacks' ``on_exception``, rank 0 says so, and the user's process raises what the workers did.
    """

    preflight: Preflight

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _check(self.preflight, function, args, trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _wrapping_function(self, process_idx: int, *arguments: Any) -> None:
        try:
            super()._wrapping_function(process_idx, *arguments)
        except SIGTERMException as stop:
            trainer, return_queue = arguments[0], arguments[4]
            _interrupt(trainer, stop)  # Lightning would call the callbacks in the user's process, which has not trained
            if process_idx == 0:
                return_queue.put(_STOPPED)
            raise

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if worker_output == _STOPPED:
            trainer.callbacks = []  # type: ignore[attr-defined]  # the workers have called them
            raise SIGTERMException
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "report": trainer.strategy.report}  # type: ignore[attr-defined]

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        trainer.strategy.report = extra["report"]  # type: ignore[attr-defined]


def _check(preflight: Preflight, function: Callable[..., Any], args: Any, trainer: pl.Trainer | None) -> None:
    model = next((arg for arg in args if isinstance(arg, pl.LightningModule)), None)
    if trainer is not None and model is not None and function.__name__ == "_fit_impl":
        preflight(trainer, model)
