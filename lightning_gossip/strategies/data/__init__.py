"""How batches and samples reach a worker, and what their number means for schedules."""
