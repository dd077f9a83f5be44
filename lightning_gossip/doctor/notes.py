"""What the ranks tell each other through the store: in small parts, since a network that loses large packets is looked for."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from torch._C._distributed_c10d import Store

PART = 400  # characters; with its key less than 576 bytes, which each network has to carry


def write(store: Store, key: str, said: Any) -> None:
    """Say something; who waits for the key finds all of it.

    Args:
        store: of the visit.
        key: under which.
        said: anything that JSON can say.
    """
    whole = base64.b85encode(zlib.compress(json.dumps(said).encode())).decode()
    parts = [whole[start : start + PART] for start in range(0, len(whole), PART)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)
        store.check([f"{key}/{number}"])  # an answer before the next: else the kernel sends several as one packet
    store.set(key, str(len(parts)))


def read(store: Store, key: str) -> Any:
    """What was said, once the key is there."""
    count = int(store.get(key))
    whole = b"".join(store.get(f"{key}/{number}") for number in range(count))
    return json.loads(zlib.decompress(base64.b85decode(whole)))
