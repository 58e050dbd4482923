"""Arrays of numbers in files: headers of ``.npy`` and of Megatron's ``.idx``, and values that accompany token ids."""
