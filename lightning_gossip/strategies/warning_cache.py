"""What has been warned of in this process: ``warning_cache.warn(text)`` warns once, on rank 0."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import WarningCache  # type: ignore[attr-defined]  # exported without saying so

warning_cache = WarningCache()
