"""Times how long a training loop waits for its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any


def timed(loader: Any, waited: Callable[[float], None]) -> Any:
    """Call `waited` with the seconds that the loop waits for each batch of `loader`.

    A loader that is not Determined's own is returned unchanged.
    """
    make = getattr(loader, "get_data_loader", None)
    if make is None:
        return loader

    def get_data_loader(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        # A trial may use one loader for its validation, too, whose type Determined
        # checks.
        return _Timed(made, waited) if options.get("repeat") else made

    loader.get_data_loader = get_data_loader
    return loader


class _Timed:
    """A loader that times the wait for each batch."""

    def __init__(self, loader: Any, waited: Callable[[float], None]) -> None:
        self._loader = loader
        self._waited = waited

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # Now, not with the first batch: Determined starts the workers before it
        # restores a state.
        return self._time(iter(self._loader))

    def _time(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited(time.perf_counter() - start)
            yield batch
