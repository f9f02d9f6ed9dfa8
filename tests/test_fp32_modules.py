"""Float32 islands: what they compute in, what they hand on, and what they survive."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import pickle
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from determined_amp.amp.fp32_modules import IslandError, keep_in_float32
from determined_amp.amp.plain_data import Values
from determined_amp.amp.rehearse.precision_audit import ProductCount

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))


# Of each layer in the forward, of 3 samples. In the backward the weights have as many,
# and the inputs too, but those of the first layer, which need no gradient.
FIRST, MIDDLE, LAST = 2 * 3 * 4 * 8, 2 * 3 * 8 * 8, 2 * 3 * 8 * 2


def flops_of(model, dtype):
    """Of a forward and its backward, by dtype."""
    with ProductCount() as count:
        with torch.autocast("cpu", dtype=dtype):
            y = model(torch.randn(3, 4))
        y.sum().backward()
    found = collections.Counter()
    for (_, computed), flops in count.flops.items():
        found[computed] += flops
    return found


@DTYPES
class TestDtypes:
    def test_products_are_float32_in_the_island_only(self, dtype):
        outside = {dtype: 2 * FIRST + 3 * LAST}
        without, model = three_layers(), three_layers()
        assert keep_in_float32(without, [], "cpu") == []
        assert flops_of(without, dtype) == {dtype: outside[dtype] + 3 * MIDDLE}
        assert keep_in_float32(model, ["1"], "cpu") == ["1"]
        assert flops_of(model, dtype) == {**outside, torch.float32: 3 * MIDDLE}

    def test_island_in_an_island_is_float32(self, dtype):
        model = nn.Sequential(three_layers(), nn.Linear(2, 2))
        assert keep_in_float32(model, ["^0$", "^0.1$"], "cpu") == ["0", "0.1"]
        in_float32 = 2 * FIRST + 3 * MIDDLE + 3 * LAST
        outside = 3 * 2 * 3 * 2 * 2
        assert flops_of(model, dtype) == {torch.float32: in_float32, dtype: outside}


class Pair(NamedTuple):
    x: Any
    mask: Any


class Attributes(dict[str, Any]):
    """Its items are attributes, too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What many models hand on, frozen at worst."""

    x: torch.Tensor
    mask: torch.Tensor


class Keeps(nn.Module):
    """Keeps what it was called with."""

    def forward(self, *args, **kwargs):
        self.args: Any = args
        self.kwargs: Any = kwargs


class Writes(nn.Module):
    """Writes into everything that it is given."""

    def forward(self, x, store):
        x.mul_(2.0)
        store["kept"].add_(1.0)
        store["made"] = 3.0 * store.pop("dropped")
        store["all"].insert(0, store["all"][0].square())
        return x.abs_()


def nested_in_others(x, mask):
    return [(x,), {"by": {"name": mask}}]


IN_ITEMS, IN_ATTRIBUTES = itemgetter("x", "mask"), attrgetter("x", "mask")
# How a container is made of a tensor and a mask, and how they are taken out of it.
CONTAINERS = [
    (dict, IN_ITEMS),
    (collections.OrderedDict, IN_ITEMS),
    (Attributes, IN_ITEMS),
    (Attributes, IN_ATTRIBUTES),
    (Pair, IN_ATTRIBUTES),
    (Output, IN_ATTRIBUTES),
    (nested_in_others, lambda made: (made[0][0], made[1]["by"]["name"])),
]


@pytest.fixture
def keeps():
    """An island that keeps its inputs."""
    model = nn.Sequential(keeps := Keeps(), nn.Linear(1, 1))
    keep_in_float32(model, ["^0$"], "cpu")
    return keeps


class TestInputs:
    @DTYPES
    @pytest.mark.parametrize(("make", "parts_of"), CONTAINERS)
    def test_inputs_are_cast_however_deep_and_what_needs_no_cast_is_handed_on(
        self, keeps, make, parts_of, dtype
    ):
        x, mask = torch.ones(2, dtype=dtype), torch.ones(2).bool()
        given, in_float32 = make(x=x, mask=mask), make(x=x.float(), mask=mask)
        keeps(given, in_float32, forward=given)
        for got in (keeps.args[0], keeps.kwargs["forward"]):
            assert type(got) is type(given)
            cast, same = parts_of(got)
            assert cast.dtype is torch.float32
            assert same is mask
        assert parts_of(given)[0] is x  # the caller's container is not changed
        assert keeps.args[1] is in_float32

    def test_packed_sequence_is_cast_and_plain_values_are_handed_on(self, keeps):
        packed = nn.utils.rnn.pack_sequence([torch.ones(2).half()])
        plain = (None, "a", torch.ones(2).double(), torch.Size([2]), Output)
        keeps(packed, *plain)
        assert type(keeps.args[0]) is type(packed)
        assert keeps.args[0].data.dtype is torch.float32
        assert all(map(operator.is_, keeps.args[1:], plain))

    @DTYPES
    def test_writes_of_an_island_reach_the_tensors_of_its_caller(self, dtype):
        """As without an island, gradients included."""
        numbers = []
        for patterns in ([], ["^0$"]):
            model = nn.Sequential(Writes(), nn.Linear(1, 1))
            keep_in_float32(model, patterns, "cpu")
            given = torch.linspace(-1, 1, 4, requires_grad=True)
            x, kept, dropped, last = (given.to(dtype) * 1.0 for _ in range(4))
            store: Values = {"kept": kept, "dropped": dropped, "all": [last]}
            y = model[0](x, store)
            assert store.keys() == {"kept", "made", "all"}
            assert store["kept"] is kept
            assert store["all"][1] is last
            made = [y, store["made"], kept, store["all"][0]]
            torch.autograd.backward(sum(part.float().sum() for part in made))
            assert given.grad is not None
            numbers.append([*(part.float() for part in made), given.grad])
        torch.testing.assert_close(*numbers, rtol=2.0**-7, atol=0)


def two_layers(activations):
    """Without biases: `activations` times x, then their sum."""
    first, last = nn.Linear(1, 4, bias=False), nn.Linear(4, 1, bias=False)
    first.weight.data = torch.tensor(activations).reshape(4, 1)
    nn.init.ones_(last.weight)
    return nn.Sequential(first, last)


class TestNumbers:
    @pytest.mark.parametrize(
        ("dtype", "activations", "without", "exact"),
        [
            (torch.float16, [2.0**15] * 4, float("inf"), 2.0**17),
            (torch.bfloat16, [256.0, 1.0, 0.0, 0.0], 256.0, 257.0),
        ],
    )
    def test_numbers_of_an_island_are_those_of_float32(
        self, dtype, activations, without, exact
    ):
        """float16 ends at 65504 < 4 * 2^15; bfloat16 has 8 bits, and 257 = 2^8 + 1
        needs 9.
        """
        model = two_layers(activations)
        x = torch.ones(1, 1)
        with torch.autocast("cpu", dtype=dtype):
            assert model(x).item() == without
        keep_in_float32(model, ["^1$"], "cpu")
        with torch.autocast("cpu", dtype=dtype):
            assert model(x).item() == exact

    def test_island_changes_nothing_where_autocast_is_off(self):
        """As with precision fp32 and tf32, and in a validation in float32."""
        model, x = three_layers(), torch.randn(3, 4)
        before = model(x)
        keep_in_float32(model, ["^1$"], "cpu")
        assert torch.equal(model(x), before)


class Recomputed(nn.Module):
    """`inner`, whose activations the backward computes again if `again` is set."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.again = False

    def forward(self, x):
        return (
            checkpoint(self.inner, x, use_reentrant=False)
            if self.again
            else self.inner(x)
        )


def nested(again):
    """Layers of which the named `Recomputed` modules are; the root's name is empty."""
    torch.manual_seed(0)
    middle = Recomputed(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    model = Recomputed(nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2)))
    for name in again:
        module = model.get_submodule(name)
        assert isinstance(module, Recomputed)
        module.again = True
    return model


def trained(model, dtype):
    """The gradients and weights of three steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=dtype):
            loss = model(torch.randn(3, 4)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        found += [p.detach().clone() for p in model.parameters()]
    return found


@DTYPES
@pytest.mark.parametrize("island", ["^inner.1$", "^inner.1.inner$"])
@pytest.mark.parametrize("again", [[""], ["inner.1"], ["", "inner.1"]])
def test_checkpointed_island_trains_the_same_bit_for_bit(island, again, dtype):
    """Around the island, in it, and both: recomputing changes neither dtypes nor
    numbers.
    """
    kept, recomputed = nested([]), nested(again)
    for model in (kept, recomputed):
        keep_in_float32(model, [island], "cpu")
    expected, found = trained(kept, dtype), trained(recomputed, dtype)
    assert len(found) == 3 * 2 * 8
    assert all(map(torch.equal, expected, found))


class TestCopies:
    def test_copies_compute_with_their_own_weights(self):
        """2^17 from the original; twice that from a copy with doubled weights."""
        model, x = two_layers([2.0**15] * 4), torch.ones(1, 1)
        keep_in_float32(model, ["^1$"], "cpu")
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                list(twin.parameters())[1].mul_(2)
                assert twin(x).item() == 2**18
                assert model(x).item() == 2**17

    def test_state_of_a_model_with_islands_fits_one_without(self):
        model = three_layers()
        keys = list(model.state_dict())
        keep_in_float32(model, ["^1$"], "cpu")
        assert list(model.state_dict()) == keys
        assert [type(module) for module in model] == [nn.Linear] * 3
        three_layers().load_state_dict(model.state_dict())


class Classifier(nn.Module):
    """A list of blocks, one head of two names, and a module whose name begins like the
    head's.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])
        self.head = self.classifier = nn.Linear(4, 4)
        self.head_norm = nn.LayerNorm(4)


class TestPatterns:
    @pytest.mark.parametrize(
        ("patterns", "names"),
        [
            ([], []),
            (["head", "^stem$"], ["stem", "head", "head_norm"]),
            (
                ["^stem$", "^blocks$", "^head$"],
                ["stem", "blocks.0", "blocks.1", "head"],
            ),
            (["^(head|classifier)$"], ["head", "classifier"]),
            (["^blocks[.][0-9]+[.]0$"], ["blocks.1.0"]),
        ],
    )
    def test_patterns_name_modules(self, patterns, names):
        """The named modules are islands, and nothing else is."""
        model = Classifier()
        assert keep_in_float32(model, patterns, "cpu") == names
        islands = {module for module in model.modules() if "forward" in vars(module)}
        assert islands == {model.get_submodule(name) for name in names}

    @pytest.mark.parametrize(
        ("pattern", "sentence"),
        [
            ("^haed$", "matches no module; near names: head"),
            (
                "^[xyz]+$",
                "matches no module; the first of its 8 modules: "
                "stem, blocks, blocks.0, blocks.1, blocks.1.0",
            ),
            (
                "head)",
                "is not a regular expression: unbalanced parenthesis at position 4",
            ),
        ],
    )
    def test_pattern_that_names_no_module_is_refused(self, pattern, sentence):
        model = Classifier()
        with pytest.raises(IslandError) as raised:
            keep_in_float32(model, ["^stem$", pattern], "cpu")
        assert str(raised.value).startswith(
            f"amp.fp32_modules: got {pattern!r}, which {sentence}"
        )
        # nothing is changed before all is known
        assert "forward" not in vars(model.stem)

    def test_patterns_that_are_wrong_are_all_named(self):
        with pytest.raises(IslandError) as raised:
            keep_in_float32(Classifier(), ["(", "^haed$", "^stem$", "^steam$"], "cpu")
        assert [line.split("'")[1] for line in str(raised.value).splitlines()] == [
            "(",
            "^haed$",
            "^steam$",
        ]

    def test_pattern_for_what_an_attention_never_calls_is_refused(self):
        """Its `out_proj` would be computed in 16 bits in silence."""
        model = nn.Sequential(nn.MultiheadAttention(4, 1), nn.Linear(4, 4))
        with pytest.raises(
            IslandError, match=r"match 0\.out_proj, but .*; allowed: 0$"
        ):
            keep_in_float32(model, ["out_proj"], "cpu")
        assert keep_in_float32(model, ["^0"], "cpu") == ["0", "0.out_proj"]

    @pytest.mark.parametrize("patterns", [[".*"], ["^$"], ["stem", "blocks", "head"]])
    def test_patterns_for_the_whole_model_are_refused(self, patterns):
        with pytest.raises(IslandError, match="leave no parameter outside"):
            keep_in_float32(Classifier(), patterns, "cpu")
