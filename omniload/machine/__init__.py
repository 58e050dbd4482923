"""When things happen: planner, source loader, data constructor, loader groups, supervisor.

Every machine holds state and answers ``handle(event) -> commands``; no I/O, no clock, no
threads. Shells in ``omniload.actors`` carry events in and commands out. Every command is
safe to repeat.
"""
