"""Mixtral's folders: the included model's weights in Hugging Face's names and format, written and read."""
