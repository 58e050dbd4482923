"""The verbs of ``omniload mix``, one module each; what they decide is decided below them."""
