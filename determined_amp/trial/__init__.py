"""Determined's side: the heart of `determined_amp.amp` in a `PyTorchTrial`."""
