"""Trials that train in mixed precision, on a Determined cluster or without one."""
