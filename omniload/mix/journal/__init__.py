"""The journal: one small record per step, durable before the step's batch is handed out."""
