"""A parameter server inside the job, and its clients."""
