"""The protocols under every schedule: n workers in one thread, and a seed that chooses who goes on.

A schedule is a sequence of choices: the shape of the job (workers, graph, steps, faults), the delay of each message, and who of
those that could go on does. It comes from a seed, or from a list of numbers that was written down. After each event the
invariants are checked; what breaks one is shrunk to few choices (:mod:`tests.schedules.shrink`) and kept as a test.

`python -m tests.schedules` runs many; `--selftest` puts known faults back in and says after how many schedules each is found.
"""
