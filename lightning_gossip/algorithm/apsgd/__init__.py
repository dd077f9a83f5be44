"""A parameter server (A-PSGD): the server's rule, and what a worker says to it."""
