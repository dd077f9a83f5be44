"""A model as one flat vector, and what is asked of its bits."""
