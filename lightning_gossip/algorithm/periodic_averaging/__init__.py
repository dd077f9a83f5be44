"""When local SGD averages: constant, piecewise constant, post-local and adaptive periods."""
