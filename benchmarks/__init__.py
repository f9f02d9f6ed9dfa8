"""Benchmarks of speed, memory and loss scale; each is one command."""
