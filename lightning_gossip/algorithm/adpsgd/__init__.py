"""AD-PSGD: the published model, whom to average with next, and how often."""
