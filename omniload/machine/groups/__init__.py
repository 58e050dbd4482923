"""The machine that fills batches of groups, round after round."""
