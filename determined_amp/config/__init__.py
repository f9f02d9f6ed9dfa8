"""Experiment YAMLs as typed settings, with every mistake named."""
