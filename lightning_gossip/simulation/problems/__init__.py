"""What is trained: objectives, models of all workers, the optimizer, who trains on which batch."""
