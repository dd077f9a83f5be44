"""Communication graphs: who may average with whom, their mixing matrices, and how fast those mix."""
