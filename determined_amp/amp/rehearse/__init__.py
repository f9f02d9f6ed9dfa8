"""Trains a batch again without a step, to see what training itself does not show."""
