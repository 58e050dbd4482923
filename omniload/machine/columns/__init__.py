"""What rows need beside tokens: metadata for the planner, images for those who encode them."""
