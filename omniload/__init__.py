"""The data plane of large-model training: samples of many sources to many ranks, balanced, in an order that resumes."""

__version__ = "0.1.0"
