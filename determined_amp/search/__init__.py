"""Searches for the initial loss scale, with or without a cluster."""
