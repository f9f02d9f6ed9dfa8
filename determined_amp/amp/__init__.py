"""Mixed precision for any training loop of PyTorch: it needs torch alone."""
