"""What lies on the store, as bytes; what is refused before anything is written."""
