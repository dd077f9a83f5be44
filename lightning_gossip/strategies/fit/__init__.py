"""One fit of one worker: sessions of training, and the synchronisation points between them."""
