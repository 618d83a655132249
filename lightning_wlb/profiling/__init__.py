"""Measures a device: its profile, the times of actions and calls, its memory and its links."""
