"""The blocks that a start touched: recorded, merged, kept, turned into hot blocks."""
