"""A small vision encoder before the included model: images to embeddings, wherever they were dealt to."""
