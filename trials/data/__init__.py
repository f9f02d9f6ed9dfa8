"""The data of the example trials, in an order that can be resumed."""
