"""When does a language model reach DDP's loss, on which links, with which slow worker? In virtual time, with real gradients.

    python -m benchmarks.time_to_loss [--quick | --redraw]

Each run trains the recipe's own small model by the package's own protocols under the simulator's clock, with the bytes and the
compute time of the large model that it stands for. Runs are kept one by one; a command that was stopped goes on.
"""
