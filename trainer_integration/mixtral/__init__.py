"""Mixtral's folders: the included model's weights as Hugging Face names and keeps them, written and read."""
