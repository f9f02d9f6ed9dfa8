"""Searches for the largest number with which a rehearsal works."""

from __future__ import annotations

from collections.abc import Callable


def largest_working(
    fails: Callable[[int], bool], guess: int, least: int, most: int
) -> int:
    """The largest number that does not fail. All numbers above a failing one must fail.

    It goes from the guess in steps that double, then halves the interval.

    Args:
        fails: Tries a number, and returns whether it fails.
        guess: The number to try first.
        least: The smallest number to try.
        most: The largest number to try.

    Returns:
        `least - 1` if all of them fail.
    """
    works, broken = least - 1, most + 1
    tried, step = min(max(guess, least), most), 1
    while broken - works > 1:
        if fails(tried):
            broken = tried
        else:
            works = tried
        if works < least:
            tried = max(broken - step, least)
        elif broken > most:
            tried = min(works + step, most)
        else:
            tried = (works + broken) // 2
        step *= 2
    return works
