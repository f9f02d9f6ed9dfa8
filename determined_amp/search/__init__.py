"""Runs searches without a cluster, and describes searches on any machine."""
