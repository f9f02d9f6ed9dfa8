"""Mixed precision for any PyTorch training loop; depends on torch only."""
