"""Trains a batch again without a step, to see in it what a training does not show."""
