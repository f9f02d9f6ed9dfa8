"""The commands of `det-amp`: their options, and what each does."""
