"""Measurements that the documentation quotes, each repeated by one command."""
