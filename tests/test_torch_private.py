"""Private names of torch are in one file, fourteen at most, and each still does what it
did.
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
OF_LIBRARY = {name for path in ELSEWHERE for name in defined_in(path.read_text())}
# Some of ours have the same name as one of torch.
OF_BOTH = {"_scale", "_enabled", "_parameters", "_buffers"}
# Notes of `check` on objects of torch, a note of ours on Determined's context, a method
# that is called on its class, ends of words, names of Python and numpy, and a module
# that torch imports late.
OF_OTHERS = {
    *("_given_dtype", "_means_cuda", "_scaled_by", "_determined_amp", "_wrong"),
    *("_length", "_period", "_io", "_NormalAccessor", "_use_fd_functions"),
    *("_core", "_reconstruct", "_dynamo"),
    *("_datasource", "_file_openers", "_TemporaryFileCloser"),
}


def theirs(path: Path) -> Iterator[str]:
    """The private names in a file that are torch's, as far as one can see."""
    source = path.read_text()
    own = set(defined_in(source))
    for line, name, is_of_self in names_in(source):
        inherited = is_of_self and name in OF_LIBRARY - OF_BOTH
        public = name.startswith((*PUBLIC, "_foreach_"))
        if not (name in own or inherited or public or name in OF_OTHERS):
            yield f"{path.name}:{line} {name}"


def test_no_other_file_touches_a_private_name_of_torch() -> None:
    assert [found for path in ELSEWHERE for found in theirs(path)] == []


def test_private_names_of_torch_are_fourteen_at_most() -> None:
    assert len({name for _, name in touched(OURS.read_text())}) <= 14


def test_planted_private_names_of_torch_are_seen(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        'x._version\ngetattr(x, "_scale")\nfrom torch._guards import detect\n'
        'hooks = [(clip_grad, "_group_tensors")]\nself._mine = 0\nself._losses\n'
        "autocast_mode._cast\n"  # `check/forwards.py` has one of its own
    )
    names = {found.partition(" ")[2] for found in theirs(planted)}
    assert names == {"_version", "_scale", "_guards", "_group_tensors", "_cast"}


def version_of() -> bool:
    tensor = torch.zeros(1)
    before = torch_private.version_of(tensor)
    return torch_private.version_of(tensor.add_(1)) > before


def number_of_a_node() -> bool:
    weight = torch.ones(1, requires_grad=True)
    first, second = weight * 2, weight * 3 + 1
    numbers = [torch_private.number_of(each.grad_fn) for each in (first, second)]
    return numbers[1] - numbers[0] == 2


def is_compiled() -> bool:
    plain, compiled = nn.Linear(1, 1), nn.Linear(1, 1)
    compiled.compile(backend="eager")
    wrapped: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    are = [torch_private.is_compiled(each) for each in (plain, compiled, wrapped)]
    return are == [False, True, True]


def backwards() -> bool:
    called: list[str] = []
    x = torch.ones(1, requires_grad=True) * 2

    def run(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called.append("run")
        return own(*args, **kwargs)

    with torch_private.backwards_through(run):
        torch.autograd.backward(x)
    return called == ["run"]


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


class Still(torch.optim.SGD):
    """Moves nothing."""

    def step(self, closure: Any = None) -> Any:
        return closure


def found_inf_of_fused() -> bool:
    """`GradScaler.step` leaves it to an optimizer that has been given found_inf."""
    weight = torch.ones(1, requires_grad=True)
    scaler, optimizer = torch.amp.GradScaler("cpu"), Still([weight])
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(getattr(optimizer, "found_inf", None))
    )
    for gives in (False, True):
        if gives:
            torch_private.give_found_inf(optimizer)
        torch.autograd.backward(scaler.scale(weight.sum()))
        scaler.step(optimizer)
        states = torch_private.states_of_steps(scaler)[id(optimizer)]
        (noted,) = states["found_inf_per_device"].values()
        scaler.update()
    before, given = seen
    # A tensor of its own: `update` adds what all optimizers found to that of the first.
    return before is None and given is not noted and bool(given == 0)


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


def operations_in_place() -> bool:
    plain, in_place = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    are = [torch_private.is_in_place(each) for each in (plain, in_place)]
    return are == [False, True]


def casts_of_autocast() -> bool:
    if not hasattr(torch.amp, "custom_fwd"):  # torch 2.3, where it is not used
        return True
    seen: list[Any] = []
    owner, name = torch_private.CASTS_OF_AUTOCAST
    own = getattr(owner, name)

    class Doubles(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)  # type: ignore[untyped-decorator]
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def cast(value: Any, *others: Any) -> Any:
        seen.append(value)
        return own(value, *others)

    with patched(owner, name, cast), torch.autocast("cpu", torch.float16):
        Doubles.apply(torch.ones(1))
    return bool(seen)


def growth_tracker() -> bool:
    return torch_private.GROWTH_TRACKER in torch.amp.GradScaler("cpu").state_dict()


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
        number_of_a_node,
        is_compiled,
        backwards,
        scale_and_states,
        found_inf_of_fused,
        sorting_of_clips,
        operations_in_place,
        casts_of_autocast,
        growth_tracker,
        hooks_of_nodes,
        casts,
    ],
)
def test_private_name_of_torch_still_does_what_the_library_needs(
    works: Callable[[], bool],
) -> None:
    assert works(), f"torch {torch.__version__} has changed what {works.__name__} needs"
