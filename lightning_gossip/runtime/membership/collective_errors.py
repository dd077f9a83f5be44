"""What an exception in a collective is about: the network, or something that will fail however often it is tried."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

# Gloo throws bare RuntimeErrors, but each tells the line of Gloo's source that it comes from
_FROM_GLOO = re.compile(r"\[[^\]\s]*\bgloo/[^\]\s]*:\d+\]")


def is_of_the_network(error: BaseException) -> bool:
    """Whether torch's backend or store has raised it, so that another worker may be the reason.

    Told by the error's type, or by the place in Gloo's source where it was thrown; not by what it is about: a collective that
    is refused for its arguments and an error of the user's that speaks of sockets are neither.

    >>> is_of_the_network(RuntimeError("[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_the_network(RuntimeError("timeout reading socket"))
    False
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_FROM_GLOO.search(str(error))))


def may_pass(error: BaseException) -> bool:
    """Whether what has failed with it may work when it is made once more; out of memory, or refused, it will not.

    >>> [may_pass(error) for error in (RuntimeError("a connection broke"), torch.OutOfMemoryError("5 GiB"), TypeError("float"))]
    [True, False, False]
    """
    hopeless = (torch.OutOfMemoryError, NotImplementedError, RecursionError)
    return isinstance(error, RuntimeError) and not isinstance(error, hopeless)
