"""Describes runs of this machine or a master: how each was made, what it reported, and
how it ended.
"""
