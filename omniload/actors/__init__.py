"""Thin shells of the machines: threads or Ray actors around them. The only place that imports ray.

``loader``, ``constructor`` and ``planner`` are plain classes that carry events in and
commands out; ``local`` runs them as threads, ``ray_plane`` as Ray actors.
"""
