"""One thing each: this process and its host, a pair of workers, the store, an all-reduce, a GPU, a training step."""
