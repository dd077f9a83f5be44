"""The first hour on a machine with GPUs, in one command and under eight minutes: ``make gpu``.

    python -m benchmarks.gpu [--quick] [--output DIR]

It takes what the machine has, says what it has left out and why, and writes ``gpu.json``, ``gpu.html`` and a trace. Without
CUDA the same stages run on an emulated device (benchmarks/emulated_device.py), and what cannot be emulated on the CPU.

| stage | question |
|---|---|
| suite | do the tests marked ``gpu`` pass? |
| overhead | what does a step boundary cost, in ms and in copies of the model, and how many exchanges are there a step? |
| trace | do the copies of the gossip overlap with computing? |
| training | how fast are AD-PSGD, periodic averaging and DDP on the same network, images and device? |
| recovery | what does a killed worker cost, and does it come back? |
"""
