"""The command `compare`: pilots, a plan, runs in every precision, and an answer."""
