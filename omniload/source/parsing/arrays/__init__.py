"""Arrays of numbers in files: heads of ``.npy`` and of Megatron's ``.idx``, and values that lie beside token ids."""
