"""Measures what one GPU reaches in each precision, in less than nine minutes; see
`run`.
"""
