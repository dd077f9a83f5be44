"""What a fit does when workers have died or come."""
