"""Reported metadata of samples in addition to their lengths, kept from the planner's floor on."""
