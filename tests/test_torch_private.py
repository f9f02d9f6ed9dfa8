"""Private names of torch are in one file, at most ten of them, and each still does what
it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import determined_amp
from determined_amp.amp import torch_private
from determined_amp.amp.patched import patched
from tests.test_private_names import PRIVATE, defined_in, names_in

LIBRARY = Path(determined_amp.__file__).parent
OURS = Path(torch_private.__file__)
# Those of Python, and what torch documents in its notes on autograd.
PUBLIC = ("_fields", "_getframe", "_exit", "_saved_")


def touched(source: str) -> Iterator[tuple[int, str]]:
    """Every private name that a file does not define itself, and its line."""
    own = set(defined_in(source))
    return ((line, name) for line, name, _ in names_in(source) if name not in own)


ELSEWHERE = [path for path in LIBRARY.rglob("*.py") if path not in (OURS, PRIVATE)]
# `check` notes these two on objects of torch.
NOTES = {"_given_dtype", "_scaled_by"}
OF_LIBRARY = {
    name for path in ELSEWHERE for name in defined_in(path.read_text())
} | NOTES
# Some of ours have the same name as one of torch.
OF_BOTH = {"_scale", "_enabled", "_parameters", "_buffers"}


def test_no_other_file_touches_a_private_name_of_torch() -> None:
    known = OF_LIBRARY - OF_BOTH
    found = [
        f"{path.name}:{line} {name}"
        for path in ELSEWHERE
        for line, name in touched(path.read_text())
        if name not in known and not name.startswith((*PUBLIC, "_foreach_"))
    ]
    assert found == []


def test_private_names_of_torch_are_ten_at_most() -> None:
    assert len({name for _, name in touched(OURS.read_text())}) <= 10


def test_planted_private_names_of_torch_are_seen() -> None:
    source = (
        'x._version\ngetattr(x, "_scale")\nfrom torch._dynamo import'
        " exc\nself._mine = 0"
    )
    assert {name for _, name in touched(source)} == {"_version", "_scale", "_dynamo"}


def version_of() -> bool:
    tensor = torch.zeros(1)
    before = torch_private.version_of(tensor)
    return torch_private.version_of(tensor.add_(1)) > before


def is_compiled() -> bool:
    plain, compiled = nn.Linear(1, 1), nn.Linear(1, 1)
    compiled.compile(backend="eager")
    wrapped: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    are = [torch_private.is_compiled(each) for each in (plain, compiled, wrapped)]
    return are == [False, True, True]


def backward_and_its_end() -> bool:
    called: list[str] = []
    x = torch.ones(1, requires_grad=True) * 2

    def hook(gradient: torch.Tensor) -> None:
        torch_private.call_after_backward(lambda: called.append("after"))

    register: Any = x.register_hook
    register(hook)

    def run(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called.append("run")
        return own(*args, **kwargs)

    with torch_private.backwards_through(run):
        torch.autograd.backward(x)
    return called == ["run", "after"]


def scale_and_states() -> bool:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    torch.autograd.backward(scaler.scale(weight.sum()))
    scaler.unscale_(optimizer)
    (found_inf,) = torch_private.states_of_steps(scaler)[id(optimizer)][
        "found_inf_per_device"
    ].values()
    torch_private.replace_scale_tensor(scaler, torch.tensor(4.0))
    return (
        bool(found_inf == 0) and float(torch_private.scale_tensor(scaler) or 0) == 4.0
    )


def found_inf_of_fused() -> bool:
    weight = torch.ones(1, requires_grad=True)
    plain, fused = torch.optim.SGD([weight]), torch.optim.SGD([weight], fused=True)
    return [torch_private.takes_found_inf(each) for each in (plain, fused)] == [
        False,
        True,
    ]


def sorting_of_clips() -> bool:
    seen: list[Any] = []

    def sort(tensors: Any, *others: Any) -> Any:
        seen.append(tensors)
        return torch_private.sort_gradients(tensors, *others)

    torch_private.sort_gradients_by(sort)
    try:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        clip_grad_norm_([weight], 1.0)
    finally:
        torch_private.sort_gradients_by(torch_private.sort_gradients)
    return bool(seen)


def hooks_of_nodes() -> bool:
    owner, name = torch_private.NODE_HOOKS
    register, seen = getattr(owner, name), []

    def registering(*args: Any) -> Any:
        seen.append(args)
        return register(*args)

    node: Any = (torch.ones(1, requires_grad=True) * 2).grad_fn
    with patched(owner, name, registering):
        node.register_hook(lambda *_: None)
        node.register_prehook(lambda *_: None)
    return len(seen) == 2


def casts() -> bool:
    seen: list[Any] = []

    class Sees(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Sees():  # type: ignore[no-untyped-call]
        torch.ones(1).to(torch.float64)
    return torch_private.CAST in seen


@pytest.mark.parametrize(
    "works",
    [
        version_of,
        is_compiled,
        backward_and_its_end,
        scale_and_states,
        found_inf_of_fused,
        sorting_of_clips,
        hooks_of_nodes,
        casts,
    ],
)
def test_private_name_of_torch_still_does_what_the_library_needs(
    works: Callable[[], bool],
) -> None:
    assert works(), f"torch {torch.__version__} has changed what {works.__name__} needs"
