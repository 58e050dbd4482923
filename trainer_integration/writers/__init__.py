"""Figures of a run for TensorBoard, Weights & Biases and MLflow, behind one protocol."""
