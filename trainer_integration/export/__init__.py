"""Use of a trained model elsewhere: weights in Hugging Face's format, and text."""
