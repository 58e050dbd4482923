"""A small vision encoder in front of the included model: images to embeddings, on the ranks they were dealt to."""
