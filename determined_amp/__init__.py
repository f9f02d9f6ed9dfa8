"""Native mixed precision for any `PyTorchTrial` of Determined: right, watched and proven."""
