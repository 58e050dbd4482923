"""The verbs of ``omniload train``, one module each."""
