"""The data plane inside torch: tensors, the ranks' meeting place, and what training frameworks expect of a loader."""
