"""Trains a float32 trial in mixed precision, without a change to its code."""
