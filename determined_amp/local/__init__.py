"""Everything a trial has from a cluster, for a run without one: storage, reports, stop, resume."""
