"""The machine: how long workers compute, links, messages on their way, the costs of collectives."""
