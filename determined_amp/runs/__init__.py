"""The runs of this machine and of a master: how each was made, what it reported, how it
ended.
"""
