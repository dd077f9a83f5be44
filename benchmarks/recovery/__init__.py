"""What does a worker that is killed, or frozen, cost the others? ``python -m benchmarks.recovery``

Eight workers train on scikit-learn's digits, every batch padded to 30 ms.

*Killed*: 12 epochs, undisturbed, and with rank 3 killed (SIGKILL) in the middle of epoch 4 and rank 6 in epoch 7. Under AD-PSGD
the others go on. Beside it DDP under torchrun, which starts all workers anew from the checkpoint of the last epoch
(``--max-restarts``, looking ten times a second); with the agent's own store the workers did not find each other again after a
restart (Gloo: connection refused, until no restart was left), so each attempt has a new one. And torchft's DDP, whose
survivors go on as well: eight replica groups of one worker, the lighthouse's times as in its example.

*The store killed*, under AD-PSGD: rank 0, which holds it, in epoch 4 (``--holder``: only this).

*Frozen*: one long epoch, in which rank 3 is stopped for 20 s (SIGSTOP, SIGCONT). AD-PSGD, and DDP.
"""
