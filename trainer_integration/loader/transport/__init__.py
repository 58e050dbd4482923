"""How batches come from workers: through memory that both sides map, used again when the consumer lets go of it."""
