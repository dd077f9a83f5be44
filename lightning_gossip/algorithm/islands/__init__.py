"""Islands, the pure part: which ranks they are, and what each of them trains on, owns and hands round."""
