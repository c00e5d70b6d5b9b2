"""A plan for devices that are not here, from the programs compiled for them."""
