"""How a run ends: signals, exceptions, heartbeats, watchdog, launcher."""
