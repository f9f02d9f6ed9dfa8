"""Runs without a cluster: what a cluster provides to a trial (storage, reports, stop, resume)."""
