"""Tests; `tests.training` and `tests.one_weight` are what they share."""
