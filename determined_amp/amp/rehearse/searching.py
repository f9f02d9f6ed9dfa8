"""Searches for the largest of the numbers that a rehearsal is tried with."""

from __future__ import annotations

from collections.abc import Callable


def largest_working(
    fails: Callable[[int], bool], guess: int, least: int, most: int
) -> int:
    """The largest number that does not fail, if everything above one that fails does,
    too.

    It goes from the guess in steps that double, then halves.

    Args:
        fails: Tries a number.
        guess: The number to try first.
        least: The smallest number to try.
        most: The largest.

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
