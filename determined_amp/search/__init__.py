"""Searches for the initial loss scale, on a cluster or without one."""
