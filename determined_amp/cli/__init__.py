"""The commands of `det-amp`, with their options."""
