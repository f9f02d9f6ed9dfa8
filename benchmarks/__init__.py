"""Measurements of speed, memory and loss scale, each by one command."""
