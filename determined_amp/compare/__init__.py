"""The command `compare`: pilots, a plan, the runs in every precision, the answer."""
