"""Thin shells of the machines: plain classes that carry events in and commands out, in either runtime."""
