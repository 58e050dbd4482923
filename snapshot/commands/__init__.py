"""The verbs of ``omniload image`` and ``omniload env``, one module each."""
