"""Reports with figures, on local runs or on experiments of a Determined master."""
