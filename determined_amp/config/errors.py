"""The base of every error that a user can put right."""

from __future__ import annotations


class UserError(Exception):
    """Said in one message without a traceback: what was given, what is allowed, what to do."""
