"""Elastic membership of a fit: workers that fail, and workers that join."""
