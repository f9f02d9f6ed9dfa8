"""Example trials in mixed precision, for a Determined cluster or a single machine."""
