"""The strategies under Lightning Fabric: the same algorithms, driven by a loop that the user writes."""
