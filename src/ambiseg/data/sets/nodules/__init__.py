"""The embedded lung nodules on simulated CT."""
