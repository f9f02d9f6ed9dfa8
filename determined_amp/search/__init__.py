"""Searches without a cluster, and what a search on any machine is."""
