"""Tests; `tests.harness` trains, `tests.trials` and `tests.run_here` are what is
trained.
"""
