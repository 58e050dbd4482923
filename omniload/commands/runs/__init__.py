"""The verbs of ``omniload mix`` on a run: how far it is, what was in a step, what its roles do."""
