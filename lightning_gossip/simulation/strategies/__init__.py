"""The strategies under virtual time, by the names and options of the real ones."""
