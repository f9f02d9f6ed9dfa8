"""Commands of `python -m determined_amp` that combine several packages."""
