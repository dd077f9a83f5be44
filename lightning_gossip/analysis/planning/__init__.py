"""What to run: arrivals at a server, schedules, learning rates by strategy."""
