"""The models of the example trials that are longer than a few lines."""
