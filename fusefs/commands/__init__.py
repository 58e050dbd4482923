"""The verbs of ``omniload fs``, one module each."""
