"""Ways between the roles of a data plane as Ray actors."""
