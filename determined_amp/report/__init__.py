"""Reads runs from folders or a master, draws them and judges them."""

from determined_amp.amp.errors import UserError


class ReportError(UserError):
    """A report cannot be made. The message says why, and what to do."""
