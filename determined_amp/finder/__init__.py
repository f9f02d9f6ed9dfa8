"""The initial loss scale, found in one pass over a few batches."""
