"""The root mean square of the error, exactly where the moments close."""
