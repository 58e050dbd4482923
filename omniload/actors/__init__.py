"""Thin shells of the machines: threads or Ray actors around them.

``roles`` holds the shells as plain classes, ``local`` runs them as threads, ``ray`` as Ray
actors. What a plane is, whichever runs it, lies beside those rooms.
"""
