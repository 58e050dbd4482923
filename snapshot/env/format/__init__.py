"""Files on the store as bytes, and the checks before anything is written."""
