"""The mean error of delayed gradient descent: characteristic roots, stability, decay, hitting times."""
