"""When local SGD averages: constant, post-local and adaptive periods."""
