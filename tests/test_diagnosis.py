"""`amp.rehearse.diagnosis`: the first thing in a batch that is not finite; looking for
it moves nothing.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from determined_amp.amp.rehearse import diagnosis
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.slots import OneSlot

ONE = OneSlot()


def find_cause(models, batch, train, *, optimizers=(), slots=ONE, scale=1.0, grown=1.0):
    """The cause in a rehearsal of these parts."""
    rehearsal = Rehearsal(train, models, optimizers, batch)
    return diagnosis.find_cause(rehearsal, slots, scale=scale, grown=grown)


class Net(nn.Module):
    """Two layers by name, each multiplying by one number, and an operation between
    them.
    """

    def __init__(self, body, head, between=torch.clone):
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.between = between
        nn.init.constant_(self.body.weight, body)
        nn.init.constant_(self.head.weight, head)

    def forward(self, x):
        return self.head(self.between(self.body(x)))


def with_frozen_mask(model):
    model.mask = nn.Parameter(torch.tensor(-torch.inf), requires_grad=False)
    return model


class Masked(nn.Module):
    """Attention with a mask of -inf, and a logarithm of 0 that is not used: all as it
    should be.
    """

    def __init__(self, weight):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.last.weight, weight)

    def forward(self, x):
        scores = self.first(x).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)
        scores = scores + torch.full((4, 4), -math.inf).triu(2)
        unused = torch.log(torch.zeros_like(x)).clamp(min=0.0)
        return self.last(torch.softmax(scores, -1) + unused)


class TakesLogarithm(nn.Module):
    """Takes a logarithm of 0 that is not used."""

    def forward(self, x):
        return (x + torch.log(torch.zeros_like(x)).clamp(min=0.0)).square()


class Checkpointed(Net):
    """Computes its middle again in the backward."""

    def __init__(self, body, head):
        super().__init__(body, head, self.again)
        self.middle = TakesLogarithm()

    def again(self, x):
        return checkpoint(self.middle, x, use_reentrant=False)


def in_float16(loss_of):
    """Trains on this loss under float16 autocast."""

    def train(scale):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of()
        (loss * scale).backward()

    return train


def batch_of(model, x, weight=1.0):
    """Trains mean(model(x)) under float16 autocast."""
    return in_float16(lambda: model(x).float().mean() * weight)


def cause(model, x, scale=1.0, *, grown=1.0):
    """The cause that is found for one fp16 batch."""
    return find_cause([model], (x,), batch_of(model, x), scale=scale, grown=grown)


def layers(*weights):
    """Layers of one weight each."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in weights))
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        nn.init.constant_(parameter, weight)
    return model


ONES = torch.ones(4, 1)
# 2^20 = 1.05e6 is beyond 65504, in the head and not in the body
LOUD = Net(2.0**10, 2.0**10)
SCALE = "no loss scale helps. Settings that help: precision: amp_bf16"
LARGE = "|activation| 1.05e+06, float16's maximum is 65504; "
GROWN = (
    "1e+05 times as large as at the start: lower learning_rate, or clip the gradients; "
)
CAUSES = {
    "none": (Net(1, 1), ONES, {}, None),
    "infinities as masks are none": (Masked(1.0), torch.ones(4, 4), {}, None),
    "weight beside such masks": (
        *(Masked(1e5), torch.ones(4, 4), {}),
        "forward overflow in module last: largest |weight| 1e+05, "
        "float16's maximum is 65504; "
        f'{SCALE}, or fp32_modules: ["^last$"]',
    ),
    "forward of a module": (
        *(LOUD, ONES, {}),
        (
            f"forward overflow in module head: largest {LARGE}{SCALE}, or fp32_modules:"
            ' ["^head$"]'
        ),
    ),
    # Four layers hand on 2^20; float32 for three of them helps nothing.
    "forward that no three islands help": (
        *(layers(2.0**10, 2.0**10, 1.0, 1.0, 1.0), ONES, {}),
        f"forward overflow in module 1: largest {LARGE}{SCALE}",
    ),
    # As in a VAE: e^12 = 1.6e5. The head gets infinity from outside, and is not blamed
    # for it.
    "operation between modules": (
        *(Net(12.0, 1.0, torch.exp), ONES, {}),
        (
            "forward overflow in exp of module the model, after module body: largest "
            f"|activation| 1.63e+05, float16's maximum is 65504; {SCALE}"
        ),
    ),
    "far beyond float16": (
        *(Net(2.0**15, 1), torch.full((4, 1), 2.0**15), {}),
        (
            "forward overflow in module body: largest |activation| 1.07e+09, float16"
            "'s maximum is 65504; so far above it, and with a loss of 1.07e+09 in"
            " float32, the precision is not the cause: look at the inputs and the"
            " initial weights, and lower learning_rate"
        ),
    ),
    "beyond float32": (
        *(Net(1e30, 1), torch.full((1, 1), 1e30), {}),
        (
            "the output of module body is not finite, not even in float32; look at the "
            "inputs and at this operation there"
        ),
    ),
    "weights that have grown": (
        *(LOUD, ONES, {"grown": 1e5}),
        (
            f"forward overflow in module head: largest {LARGE}the weights are {GROWN}no"
            " precision helps"
        ),
    ),
    "one of three operations of a name": (
        *(Net(1.0, 1.0, lambda x: x * 2.0 + x * 2.0**20 + x * 4.0), ONES, {}),
        (
            "forward overflow in mul of module the model, after module body: largest "
            f"{LARGE}{SCALE}"
        ),
    ),
    # 2 x 64 / 4 for each of four samples of 2^10.
    "gradient behind a checkpoint": (
        *(Checkpointed(2.0**-10, 1.0), torch.full((4, 1), 2.0**10), {"scale": 2.0**6}),
        (
            "gradient overflow at module body at a loss scale of 64; at 2^4 nothing "
            "overflows: lower "
            "init_scale. Settings that help: precision: amp_bf16, or fp32_modules: "
            '["^body$"]'
        ),
    ),
    # The head gets 2^8 and hands on 2^18, which it has to cast even if it is in
    # float32.
    "gradient of a module": (
        *(Net(2.0**-10, 2.0**10), ONES, {"scale": 2.0**10}),
        (
            "gradient overflow at module head at a loss scale of 1024; at 2^5 nothing "
            "overflows: lower init_scale. Settings that help: precision: amp_bf16"
        ),
    ),
    # 2^18 / 4 = 2^16 > 65504 where the loss casts the head's output, and from there on.
    "gradient of the loss": (
        *(Net(1, 1), ONES, {"scale": 2.0**18}),
        (
            "gradient overflow at the loss, outside the model at a loss scale of"
            " 262144; at 2^15 nothing overflows: lower init_scale. Settings that help:"
            " precision: amp_bf16"
        ),
    ),
    # That of 1 / x at 1e-3 is -1e6, whatever the loss scale.
    "derivative that overflows at every scale": (
        *(Net(1e-3, 1e-3, torch.reciprocal), torch.ones(1, 1), {}),
        (
            "gradient overflow at module the model at every loss scale. Settings that "
            "help: precision: amp_bf16"
        ),
    ),
    "sample that has made the parameters NaN": (
        *(Net(math.nan, 1), torch.tensor([[1.0], [math.nan]]), {}),
        (
            "input 0 of the batch is not finite in samples [1]; fix or remove these "
            "samples"
        ),
    ),
    "derivative beside a parameter that is infinite by intent": (
        *(with_frozen_mask(Net(1e-3, 1e-3, torch.reciprocal)), torch.ones(1, 1), {}),
        (
            "gradient overflow at module the model at every loss scale. Settings that "
            "help: precision: amp_bf16"
        ),
    ),
    "parameter that is lost already": (
        *(Net(math.nan, 1), ONES, {}),
        (
            "parameter body.weight is already not finite; resume from an earlier "
            "checkpoint with a lower learning rate or a clip"
        ),
    ),
}


@pytest.mark.parametrize(
    ("model", "x", "options", "sentence"), CAUSES.values(), ids=CAUSES
)
def test_cause_is_named_where_it_begins(model, x, options, sentence):
    assert cause(model, x, **options) == sentence


class TestDiagnosis:
    @pytest.mark.parametrize(
        ("batch", "where"),
        [
            (
                torch.tensor([[1.0, 1.0], [1.0, math.nan], [math.inf, 1.0]]),
                "0 {} [1, 2]",
            ),
            ((torch.ones(3, 2), torch.tensor([1.0, math.nan, 2.0])), "1 {} [1]"),
            (
                {"empty": torch.empty(0, 2), "number": torch.tensor(math.inf)},
                "1 {} [0]",
            ),
        ],
        ids=["a tensor", "a tuple", "a dict"],
    )
    def test_cause_names_the_samples_that_are_not_finite(self, batch, where):
        place = where.format("of the batch is not finite in samples")
        model = nn.Linear(2, 1)

        def train(scale):
            torch.autograd.backward(model.weight.sum() * math.nan)

        found = find_cause([model], batch, train)
        assert found == f"input {place}; fix or remove these samples"

    @pytest.mark.parametrize(
        ("lost", "module"),
        [(["body"], "body"), (["body", "head"], "head"), ([], "the model")],
    )
    def test_cause_names_the_module_whose_parameters_gradient_alone_overflows(
        self, lost, module
    ):
        model = Net(1, 1)
        own = nn.Parameter(torch.ones(1))
        if not lost:
            model.register_parameter("own", own)

        def train(scale):
            for parameter in [
                model.get_parameter(f"{name}.weight") for name in lost
            ] or [own]:
                parameter.grad = torch.full_like(
                    parameter, math.inf if scale > 8 else 1.0
                )

        found = find_cause([model], (), train, scale=64.0)
        assert str(found).startswith(
            f"gradient overflow at module {module} at a loss scale of 64; at 2^3 "
            "nothing overflows"
        )

    def test_advice_of_a_scale_below_1_names_min_scale_too(self):
        """Each of four samples gets 2^18 / 4."""
        model = Net(1, 1)
        found = find_cause([model], (), batch_of(model, ONES, 2.0**18), scale=1.0)
        assert "at 2^-3 nothing overflows: lower init_scale and min_scale. Sett" in str(
            found
        )

    def test_mask_in_the_batch_and_overflow_of_a_statistic_are_no_cause(self):
        model = nn.Sequential(nn.Linear(1, 4), nn.Softmax(-1), nn.Linear(4, 1))
        mask = torch.tensor([0.0, 0.0, -math.inf, -math.inf])

        def loss_of():
            scores = model[0](torch.ones(1, 1)) + mask
            output = model[2](model[1](scores))
            with torch.no_grad():
                assert not (output * 2.0**30).isfinite().all()
            return output.float().sum()

        train = in_float16(loss_of)
        assert find_cause([model], mask, train) is None
        sentence = str(find_cause([model], mask, train, scale=2.0**40))
        assert "nothing overflows: lower init_scale" in sentence

    def test_zero_over_zero_is_named_as_beyond_float16(self):
        """An eps of 1e-9 is 0 in float16."""
        model = Net(1e-9, 1)

        def loss_of():
            hidden = model.body(torch.ones(1, 1))
            return model.head(hidden / (hidden.abs() + 1e-9)).float().sum()

        assert str(find_cause([model], (), in_float16(loss_of))).startswith(
            "the output of div outside the model, after module body is not finite in "
            "float16, and at most 0.5 in float32: its inputs exceed the range of "
            "float16; no loss scale helps. "
        )

    def test_overflow_in_a_cast_of_the_trial_itself_is_named_as_such(self):
        model = Net(1, 1)

        def train(scale):
            hidden = (model.body(torch.ones(1, 1)) * 2.0**20).half()
            torch.autograd.backward(model.head(hidden.float()).sum() * scale)

        assert (
            str(find_cause([model], (), train))
            == "forward overflow in _to_copy outside the model, after module body,"
            " which "
            "the trial itself computes in float16: remove that cast"
        )

    def test_parameter_that_is_in_no_model_is_watched(self):
        temperature = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([temperature], lr=0.1)
        train = in_float16(lambda: (temperature.half() * 16.0).float().sum())
        found = find_cause([], (), train, scale=2.0**14, optimizers=[optimizer])
        assert "at 2^11 nothing overflows: lower init_scale" in str(found)

    def test_diagnosis_that_runs_out_of_memory_says_that_the_cause_is_unknown(self):
        def fail(scale):
            raise torch.cuda.OutOfMemoryError

        assert (
            find_cause([Net(1, 1)], (), fail)
            == "unknown: there was no memory to look for it"
        )


class TestAdvice:
    @pytest.mark.parametrize(
        ("models", "module", "patterns"),
        [
            (
                [nn.Sequential(layers(2.0**10), nn.Sequential(layers(2.0**10)))],
                "1.0.0",
                r'["^1\\.0\\.0$"]',
            ),
            # As DistributedDataParallel names what it wraps.
            ([Net(1, 1), Net(2.0**10, 2.0**10)], "model 1: head", '["^head$"]'),
            # The overflow moves on from one to the next.
            ([layers(2.0**12, 2.0**8, 2.0**-17, 1)], "1", '["^1$", "^2$"]'),
        ],
        ids=["in two others", "of two models", "one after the other"],
    )
    def test_advice_is_bfloat16_or_the_modules_that_were_seen_to_help(
        self, models, module, patterns
    ):
        train = batch_of(models[-1], torch.ones(4, 1))
        sentence = str(find_cause(models, (), train))
        assert f"forward overflow in module {module}: largest" in sentence
        helps = f"Settings that help: precision: amp_bf16, or fp32_modules: {patterns}"
        assert sentence.endswith(helps)

    def test_advice_says_that_nothing_helps(self):
        def loss_of():
            output = model(torch.ones(1, 1))
            if output.dtype is torch.bfloat16:
                raise TypeError("numpy has none")
            return output.float().mean()

        model = layers(2.0**17)
        assert str(find_cause([model], (), in_float16(loss_of))).endswith(
            "Neither amp_bf16 nor fp32_modules was seen to help: train it in fp32"
        )


def two_slots(rank, other=()):
    """The slots of a training: what this one says is kept, what the other says is
    given.

    Args:
        rank: That of this slot.
        other: What the other says each time; by default the same as this one.
    """
    said, others = [], iter(other)

    def allgather(value):
        said.append(value)
        theirs = next(others, value)
        return [theirs, value] if rank else [value, theirs]

    return SimpleNamespace(rank=rank, size=2, said=said, allgather=allgather)


class TestSeveralSlots:
    """A forward may wait for those of other slots, so all make the same rehearsals."""

    def test_sound_slot_rehearses_as_one_in_trouble_and_names_its_cause(self):
        causes, scales = [], []
        said = []
        for rank, loud in enumerate((2.0**10, 1.0)):
            model, here = Net(loud, loud), []
            train, slots = batch_of(model, ONES), two_slots(rank, said)

            def counted(scale, train=train, here=here):
                here.append(scale)
                train(scale)

            causes.append(find_cause([model], (ONES,), counted, scale=8.0, slots=slots))
            scales.append(here)
            said = slots.said
        assert "forward overflow in module head" in str(causes[0])
        assert causes[0] == causes[1]
        assert scales[0] == scales[1]
        # as it is, at a small scale, float32, bfloat16, an island
        assert len(scales[0]) == 5

    def test_error_on_one_slot_is_reported_and_keeps_no_other_waiting(self):
        slots = two_slots(rank=0)
        cause = find_cause([Net(1, 1)], (), lambda scale: 1 / 0, slots=slots)
        told = (
            "not found: training the batch again raised ZeroDivisionError: division by"
            " zero"
        )
        assert cause == told
        assert len(slots.said) == 1
