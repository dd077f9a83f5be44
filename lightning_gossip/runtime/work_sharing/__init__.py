"""The counter from which workers claim an epoch's batches, and what each has finished."""
