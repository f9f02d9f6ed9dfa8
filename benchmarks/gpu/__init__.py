"""Measures one GPU in each precision, in less than nine minutes; see `run`."""
