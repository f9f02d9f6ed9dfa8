"""Tests; `tests.harness` trains, `tests.trials` and `tests.training` are what is
trained.
"""
