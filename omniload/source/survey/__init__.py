"""Looking at what sources hold before anything is trained on it: lengths, equal documents."""
