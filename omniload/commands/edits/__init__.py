"""Verbs that change the mix of a job while it runs."""
