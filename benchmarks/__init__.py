"""Measurements: each module is one command that writes its table, and its picture if it has one."""
