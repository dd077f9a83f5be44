"""Vectors in fewer bytes: for pairs, for all-reduced gradients, for means."""
