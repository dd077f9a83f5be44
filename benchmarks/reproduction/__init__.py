"""The papers' headlines in the simulator, one small file a headline.

    python -m benchmarks.reproduction [name ...]

What came out, beside what the papers say, is in ``docs/reproduction.md``.
"""
