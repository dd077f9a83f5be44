"""The process groups of a rank in an island, and what ranks of one tell each other after a batch."""
