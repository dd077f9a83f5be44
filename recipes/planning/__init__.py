"""What ``python -m recipes.plan`` is made of: what is known, times, dynamics, the choice, figures, and what a plan leaves."""
