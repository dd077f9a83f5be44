"""What ``python -m recipes.simulate`` is made of: the scenario of a configuration, what a simulated run leaves, figures."""
