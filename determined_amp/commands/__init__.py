"""What the verbs of `python -m determined_amp` do that no room below does on its own."""
