"""Process groups, the device mesh and collectives over them."""
