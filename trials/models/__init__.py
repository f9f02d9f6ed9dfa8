"""The larger models of the example trials."""
