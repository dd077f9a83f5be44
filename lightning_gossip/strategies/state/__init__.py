"""A worker's model and what else is its state: what is shared, what is compared, what goes into checkpoints."""
