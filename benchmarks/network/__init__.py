"""Time to accuracy on real sockets over limited links: this package's strategies against what a user would pick instead.

    python -m benchmarks.network [--quick] [--scenario NAME] [--rates …] [--contenders …] [--seeds N] [--resume]

Four hosts as network namespaces (benchmarks/cluster), one worker each. One run is one contender under one condition with one
seed; the runs of a table alternate. What was measured is kept in ``results/network.json`` after every single run.
"""
