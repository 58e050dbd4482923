"""How batches come from workers: through memory that both sides map, reused when the consumer releases it."""
