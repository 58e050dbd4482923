"""What a start touched: recorded, merged, kept, shared, turned into hot blocks."""
