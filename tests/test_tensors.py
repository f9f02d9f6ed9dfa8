"""`amp.tensors`: what is asked of tensors of every kind, and of optimizers."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from determined_amp.amp import tensors

NAN, INF = math.nan, math.inf


def nested(*parts):
    made = [torch.tensor(part) for part in parts]
    return torch.nested.nested_tensor(made, layout=torch.jagged)


def sparse(*values):
    """With every other value from 0 given, and the first one given in two parts."""
    indices = torch.tensor([[0, *range(0, 2 * len(values), 2)]])
    parts = torch.tensor([values[0] - 1.0, 1.0, *values[1:]])
    return torch.sparse_coo_tensor(
        indices, parts, (2 * len(values),), check_invariants=False
    )


@pytest.mark.parametrize(
    ("made", "largest", "has_nan", "is_finite", "is_plain"),
    [
        (torch.tensor([1.0, -3.0]), 3.0, False, True, True),
        (torch.tensor([1.0, -INF], requires_grad=True), INF, False, False, True),
        (torch.tensor([NAN, 1.0]), NAN, True, False, True),
        (torch.tensor(-2.0), 2.0, False, True, True),
        (torch.empty(0, 3), 0.0, False, True, False),
        (sparse(5.0, -2.0), 5.0, False, True, False),
        (sparse(NAN, 2.0), NAN, True, False, False),
        (nested([1.0], [-4.0, 2.0]), 4.0, False, True, False),
        (nested([1.0], [INF]), INF, False, False, False),
    ],
    ids=[
        *(
            "dense",
            "infinite",
            "NaN",
            "one number",
            "empty",
            "sparse",
            "sparse with NaN",
        ),
        *("nested", "nested and infinite"),
    ],
)
def test_largest_number_and_finiteness_are_known_of_any_kind_of_tensor(
    made, largest, has_nan, is_finite, is_plain
):
    assert tensors.largest_of(made) == pytest.approx(largest, nan_ok=True)
    assert tensors.has_nan(made) is has_nan
    assert tensors.is_finite(made) is is_finite
    assert tensors.is_plain(made) is is_plain


def test_tensors_are_those_of_all_containers_in_order():
    one, two, three, four = torch.eye(4)
    seen = tensors.tensors_of([one, {"a": (two, "b")}, UserDict(c=[three]), 5, four])
    assert list(map(id, seen)) == list(map(id, (one, two, three, four)))
    assert [*tensors.tensors_of("text")] == []


@dataclass
class Rows:
    rows: torch.Tensor


def test_copy_holds_the_same_values_in_memory_of_its_own():
    whole = torch.arange(6.0)
    batch: Any = [{"ids": whole[:2]}, UserDict(mask=whole[2:4]), Rows(whole[4:])]
    copied: Any = tensors.own_copy(batch)
    made = (copied[0]["ids"], copied[1].pop("mask"), copied[2].rows)
    assert torch.cat(made).tolist() == whole.tolist()
    for tensor in made[:2]:
        assert tensor.untyped_storage().nbytes() == 8  # not all that it is a view of
    torch._foreach_zero_([*made])
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [*batch[1]] == ["mask"]


def test_copy_of_containers_shares_tensors_and_what_cannot_be_copied():
    batch: Any = {"ids": torch.ones(2), "more": [[torch.zeros(1)]]}
    for kind in (dict, UserDict):
        mine = kind(batch)
        shared = tensors.own_copy(mine, shared=True)
        assert type(shared) is kind
        assert shared.pop("ids") is mine["ids"]
    assert tensors.own_copy(batch, shared=True)["more"][0].pop() is batch["more"][0][0]
    generator = (number for number in (1, 2))
    assert tensors.own_copy(generator) is generator


class Wrapped(DistributedDataParallel):
    """Needs no ranks."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


def test_parameters_of_several_models_are_named_by_model_and_come_once():
    one, two = nn.Linear(1, 1, bias=False), nn.Linear(2, 2, bias=False)
    apart = nn.Parameter(torch.ones(1))
    models = [Wrapped(one), two]
    assert dict(tensors.named_parameters(models[:1])) == {"weight": one.weight}
    assert dict(tensors.named_parameters(models)) == {
        "model 0: weight": one.weight,
        "model 1: weight": two.weight,
    }
    optimizer = torch.optim.SGD([one.weight, apart], lr=1.0)
    seen = tensors.parameters_in(models, [optimizer])
    assert list(map(id, seen)) == list(map(id, (one.weight, two.weight, apart)))


def test_tensor_has_numbers_until_its_storage_is_given_back():
    whole = torch.ones(4)
    part = whole[2:]
    assert tensors.has_numbers(whole)
    assert tensors.has_numbers(part)
    assert tensors.has_numbers(torch.ones(0))
    whole.untyped_storage().resize_(0)
    assert not tensors.has_numbers(whole)
    assert not tensors.has_numbers(part)
    assert not tensors.has_numbers(torch.ones(1, device="meta"))
