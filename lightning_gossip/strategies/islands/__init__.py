"""Islands to Lightning: the part of a model that each rank gossips, and how it is handed round."""
