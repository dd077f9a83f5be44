"""What a cluster is like before anything is trained on it: ``python -m lightning_gossip.doctor``; see docs/doctor.md.

| module | what |
|---|---|
| ``measure/`` | one thing each: this process, a pair of workers, the store, an all-reduce, a GPU, a training step |
| ``rounds``, ``clocks`` | pure: which pairs are measured at once; clock offsets from pairs |
| ``report`` | what was measured, as it is written down |
| ``verdicts`` | pure: what is wrong, in words, and what to do |
| ``plan`` | what the planner would choose |
| ``launch``, ``session`` | the ranks as their launcher has started them, and what they do together |
| ``matrices``, ``show``, ``picture``, ``cluster_file`` | tables, heat map, cluster.json |
"""
