"""The process behind one mounted image, and its options."""
