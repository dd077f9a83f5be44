"""Whether an exception in a collective is of a kind that will come however often it is tried."""

from __future__ import annotations

import torch


def may_pass(error: BaseException) -> bool:
    """Whether what has failed with it may work when it is made once more; out of memory, or refused, it will not.

    >>> [may_pass(error) for error in (RuntimeError("a connection broke"), torch.OutOfMemoryError("5 GiB"), TypeError("float"))]
    [True, False, False]
    """
    hopeless = (torch.OutOfMemoryError, NotImplementedError, RecursionError)
    return isinstance(error, RuntimeError) and not isinstance(error, hopeless)
