"""Data for the example trials; a resumed run continues their order exactly."""
