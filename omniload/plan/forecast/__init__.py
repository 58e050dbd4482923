"""Forecasts of a run before it starts: shares, epochs, and the beginning of its stages."""
