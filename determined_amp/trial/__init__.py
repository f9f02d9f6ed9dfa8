"""The adapter to Determined: uses `determined_amp.amp` in a `PyTorchTrial`."""
