"""The data of the example trials, in an order that a resumed run continues exactly."""
