"""Circumstances in which a loss is evaluated again and again as the same function, and leaves everything as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def unchanged_random_state(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Put the global random generators back: torch's on the CPU and on these devices, numpy's, Python's."""
    python, legacy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def seed_everything(seed: int, devices: Sequence[torch.device] = ()) -> None:
    """Seed these generators; unlike ``torch.manual_seed`` no device's but these."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for device in devices:
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


@contextmanager
def unchanged_module(module: nn.Module | None) -> Iterator[None]:
    """Put a module's buffers and modes back, whatever happens."""
    modules = [] if module is None else list(module.modules())
    modes = [part.training for part in modules]
    buffers = [dict(part._buffers) for part in modules]
    values = {id(b): (b, b.detach().clone()) for own in buffers for b in own.values() if b is not None}
    try:
        yield
    finally:
        for part, mode, own in zip(modules, modes, buffers, strict=True):
            part.training = mode
            part._buffers.clear()
            part._buffers.update(own)
        with torch.no_grad():
            for buffer, value in values.values():
                buffer.copy_(value)


@contextmanager
def twice_differentiable(module: nn.Module | None, devices: Sequence[torch.device]) -> Iterator[None]:
    """Gradients on, and kernels that have second derivatives, in full precision."""
    recurrent = module is not None and any(isinstance(part, nn.RNNBase) for part in module.modules())
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in sorted({"cpu", *(device.type for device in devices)}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if recurrent and any(device.type == "cuda" for device in devices):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import costs seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
