"""Runnable examples: ``python -m recipes.train``."""
