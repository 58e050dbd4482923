"""The data plane inside torch: tensors, the ranks' meeting place, and what frameworks expect of a loader."""
