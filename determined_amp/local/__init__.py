"""Runs without a cluster: the storage, reports, stop and resume that a cluster would
provide.
"""
