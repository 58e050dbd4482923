"""What source loaders report of samples beside their lengths, kept from the planner's floor on."""
