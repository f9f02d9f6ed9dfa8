"""Lets `"cuda"` mean the CPU on a machine without a GPU.

So a script that is written for CUDA can be examined. The recorder enters `StandIn` for
the training, which also tells it of each torch function that is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.torch_private import CASTS_OF_AUTOCAST, backwards_through
from determined_amp.amp.users_code import is_users
from determined_amp.check.record import caller

# A note for the user.
ONLY_ON_A_GPU = (
    'this machine has no GPU, so "cuda" meant the CPU, and AMP that your code switches '
    "on where it finds a GPU was off"
)

# From docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
_FLOAT32_ON_CUDA = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits
    cdist cosh cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist
    erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10
    log1p log2 log_softmax margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss norm pdist poisson_nll_loss pow prod reciprocal
    renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan
    triplet_margin_loss
"""


class StandIn(TorchFunctionMode):
    """A mode that sees each call of a torch function, and runs CUDA's calls on the CPU.

    It redirects them only on a machine without a GPU. There it also computes in float32
    what CUDA's autocast computes in float32 and the CPU's does not, and refuses what
    CUDA's autocast refuses.

    Args:
        hear: Called with the name of a function, its arguments and its result.

    Attributes:
        is_asked: Whether the training asks for CUDA on a machine without a GPU.
        applies: Whether an autocast region of CUDA was made without a GPU, and none for
            the CPU; None if there was neither.
    """

    _float32_on_cuda = frozenset([*_FLOAT32_ON_CUDA.split(), "binary_cross_entropy"])

    def __init__(self, hear: Callable[[str, Any, Any], None]) -> None:
        super().__init__()
        self.is_asked = False
        self.applies: bool | None = None
        self._hear = hear
        self._is_needed = not torch.cuda.is_available()
        self._device_types: set[str] = set()  # of the devices in the training's code

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Enter this mode, and let `"cuda"` mean the CPU if there is no GPU."""
        with ExitStack() as stack:
            if self._is_needed:
                for owner, name, replacement in _replacements(self):
                    stack.enter_context(patched(owner, name, replacement))
                stack.enter_context(warnings.catch_warnings())
                for words in (
                    "CUDA is not available",
                    ".*torch.cuda.amp",
                    "User provided device_type",
                ):
                    warnings.filterwarnings("ignore", words)
                stack.enter_context(backwards_through(self._run_backward))
            make = self._making_autocast(torch.autocast.__init__)
            stack.enter_context(patched(torch.autocast, "__init__", make))
            stack.enter_context(self)
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self._is_needed:
            if name in ("cuda", "pin_memory"):
                self.is_asked |= name == "cuda"
                return args[0]
            here = [self.on_cpu(each) for each in args]
            if name == "device" and is_users(caller().f_code.co_filename):
                self._device_types.add("cpu" if here == [*args] else "cuda")
            args = here
            kwargs = {key: self.on_cpu(value) for key, value in kwargs.items()}
        if self.applies and name in self._float32_on_cuda and autocast_is_on("cpu"):
            if name == "binary_cross_entropy":
                raise RuntimeError(f"{name} and BCELoss are unsafe to autocast")
            args, kwargs = as_float32((args, kwargs))
        with _own_lstm() if name == "lstm" else nullcontext():
            result = func(*args, **kwargs)
        self._hear(name, (args, kwargs), result)
        return result

    def on_cpu(self, device: Any) -> Any:
        """The CPU in place of a CUDA device; any other value as it is."""
        here = _without_cuda(device)
        self.is_asked |= here is not device
        return here

    def is_available(self) -> bool:
        """Replaces `torch.cuda.is_available`."""
        self.is_asked |= is_users(caller().f_code.co_filename)
        return False

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward in this mode.

        torch leaves modes out of a backward, in which a checkpoint computes its forward
        again.
        """
        with self:
            return run(*args, **kwargs)

    def _making_autocast(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A constructor that makes a region of the CPU for CUDA, with CUDA's dtype."""

        @wraps(own)
        def make(
            region: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            is_users_own = is_users(caller().f_code.co_filename)
            is_cuda = self.on_cpu(device_type) != device_type
            # The training may pass `device.type` of its only device, made as "cuda".
            is_type = device_type == "cpu" and self._device_types == {"cuda"}
            is_cuda |= is_type and is_users_own and dtype is not torch.bfloat16
            if self._is_needed and is_cuda:
                self.applies = self.applies is not False
                # float16 is the default of CUDA.
                device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
            elif is_users_own:
                # Regions that torch makes, as for a checkpoint, do not count.
                self.applies = False
            own(region, device_type, dtype, *args, **kwargs)

        return make


def unheard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of the doctor so that torch's function modes miss it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


@contextmanager
def _own_lstm() -> Iterator[None]:
    """Compute an LSTM without oneDNN, which has none in float16 on most CPUs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _without_cuda(device: Any) -> Any:
    """Return "cpu" in place of a CUDA device; any other value as it is."""
    if not isinstance(device, (str, torch.device)):
        return device  # most arguments of torch functions
    return "cpu" if str(device).split(":")[0] == "cuda" else device


def _asked_of_cpu(own: Callable[[str], Any], device: str = "cuda") -> Any:
    """Ask a function of torch about the CPU in place of CUDA."""
    return own(_without_cuda(device))


def _replacements(here: StandIn) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the owner and the name of what is replaced, and the replacement."""
    make = torch.amp.GradScaler.__init__

    @wraps(make)
    def make_scaler(
        scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any
    ) -> None:
        make(scaler, here.on_cpu(device), *args, **kwargs)

    yield torch.amp.GradScaler, "__init__", make_scaler
    yield torch.cuda, "is_available", here.is_available
    # torch 2.3 has a function for each device
    if not hasattr(torch, "get_autocast_dtype"):
        yield torch, "is_autocast_enabled", torch.is_autocast_cpu_enabled
        yield torch, "get_autocast_gpu_dtype", torch.get_autocast_cpu_dtype
        return
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, partial(_asked_of_cpu, getattr(torch, name))
    cast = getattr(*CASTS_OF_AUTOCAST)
    yield (
        *CASTS_OF_AUTOCAST,
        lambda value, device, to: cast(value, _without_cuda(device), to),
    )
