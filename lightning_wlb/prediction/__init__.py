"""What a plan will take on a device: time and memory of every action, and the simulated step."""
