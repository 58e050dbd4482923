"""What only the kernel can promise: locks that end with their holder."""
