"""The verbs of ``omniload mix``, one module each; the packages below them decide, and commands only ask and print."""
