"""Thin shells of the machines: threads or Ray actors around them.

``roles`` has the shells as plain classes, ``local`` runs them as threads, ``ray`` as Ray
actors. The modules of this folder are shared by both runtimes.
"""
