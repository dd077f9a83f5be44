"""The groups between islands, and what ranks of an island tell each other in every step."""
