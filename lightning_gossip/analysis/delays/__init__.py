"""Laws of the delay between reading a model and applying its gradient."""
