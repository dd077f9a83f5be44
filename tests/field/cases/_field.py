"""Starts a case as a user would (`python script.py`, Lightning starts the second worker) and judges what the workers report.

A case is a module with `worker(strategy)`, run on every rank, whose return value is kept, and `judge(ranks, run)`, which sees
all of them. `python NN_name.py STRATEGY` prints OK ... or FAIL ... as its last line and exits with 0 or 1.
FIELD_VERBOSE=1 prints the workers' output too; FIELD_SLOW_RANK=0 makes rank 0 the one that takes few batches, as on a busy
host. `tests/field/test_cases.py` runs the same two functions in forked workers,
which is faster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def folder() -> Path:
    return Path(os.environ["FIELD_DIR"])


def trainer(strategy, **options):
    import lightning as L

    import lightning_gossip  # noqa: F401 - registers the strategies

    defaults = {
        "strategy": strategy,
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder(),
        "log_every_n_steps": 1,
    }
    made = L.Trainer(**{**defaults, **options})
    if os.environ.get("FIELD_SLOW_RANK") == str(rank()):
        made.callbacks.insert(0, _slow())
    return made


def _slow():
    """A callback that makes this rank's steps last 50 ms longer."""
    import lightning as L

    class Slow(L.Callback):
        def on_train_batch_start(self, *_):
            time.sleep(0.05)

    return Slow()


def unused_ok(strategy):
    """DDP has to be told that not every parameter gets a gradient in each backward pass."""
    return strategy.replace("ddp", "ddp_find_unused_parameters_true") if strategy.startswith("ddp") else strategy


def digits(n=64, seed=0, features=8, classes=3):
    """A learnable toy problem: inputs, labels, and each sample's number."""
    x = torch.randn(n, features, generator=torch.Generator().manual_seed(seed))
    w = torch.randn(features, classes, generator=torch.Generator().manual_seed(7))
    return x, (x @ w).argmax(1), torch.arange(n)


def weights(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}


@dataclass
class Run:
    strategy: str
    code: object  # exit status, or "hang"
    seconds: float
    out: str


def same(ranks, key, tol=1e-6, only=lambda name: True):
    """Largest difference over ranks of a dict of tensors (or a number) that each reported."""
    first = ranks[0][key]
    for r in ranks[1:]:
        other = r[key]
        pairs = [(n, first[n], other[n]) for n in first if only(n)] if isinstance(first, dict) else [(key, first, other)]
        for name, a, b in pairs:
            if isinstance(a, (str, list, tuple)):
                assert a == b, f"{key}: {a!r} on rank 0, {b!r} on another"
                continue
            gap = (torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max().item()
            assert gap <= tol, f"{name} differs over ranks by {gap:.3g}"


def main(worker, judge, *, workers=2, deadline=120, may_refuse=False, interrupt=None, suffix=""):
    strategy = (sys.argv[1] if len(sys.argv) > 1 else "adpsgd") + suffix
    if "FIELD_DIR" in os.environ:
        torch.set_num_threads(1)
        result = worker(strategy)
        torch.save(result, folder() / f"rank{rank()}.pt")
        return
    with tempfile.TemporaryDirectory() as place:
        env = dict(os.environ, FIELD_DIR=place, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
        for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"):
            env.pop(name, None)
        log, began = Path(place) / "log", time.time()
        command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=place, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            signal.signal(
                signal.SIGTERM, lambda *_: sys.exit(f"FAIL {strategy}: the driver was told to end")
            )  # `finally` ends the workers
            try:
                if interrupt is not None:
                    interrupt(process, Path(place))
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                code = "hang"
            finally:
                seconds = time.time() - began
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the session that this driver has made, nobody else's
                process.wait()
        run = Run(strategy, code, seconds, log.read_text(errors="replace"))
        if os.environ.get("FIELD_VERBOSE"):
            print(run.out)
        try:
            verdict = _verdict(run, judge, Path(place), workers, may_refuse, interrupt)
        except AssertionError as wrong:
            print(f"FAIL {strategy} {seconds:.0f}s: {wrong}")
            sys.exit(1)
        print(f"OK {strategy} {seconds:.0f}s: {verdict or 'as it should be'}")


def _verdict(run, judge, place, workers, may_refuse, interrupt):
    refusal = next((line for line in run.out.splitlines() if "ConfigurationError:" in line), None)
    if may_refuse and run.code not in (0, "hang") and refusal:
        return "refused: " + refusal.split("ConfigurationError:", 1)[1].strip()[:160]
    if interrupt is None:
        assert run.code != "hang", f"hangs ({run.seconds:.0f} s): {_last_words(run.out)}"
        assert run.code == 0, f"exit status {run.code}: {_last_words(run.out)}"
    found = [place / f"rank{r}.pt" for r in range(workers)]
    ranks = [torch.load(path, weights_only=False) if path.exists() else None for path in found]
    return judge(ranks, run)


def _last_words(out):
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or [""])[-1][-300:]
