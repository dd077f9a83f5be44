"""The mean of all models, at once or behind the next local steps."""
