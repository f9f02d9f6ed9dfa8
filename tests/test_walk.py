"""The walk of one batch through the library, as docs/architecture.md shows it."""

import gc
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import determined_amp
from determined_amp import AmpLoop, AmpSettings, Precision
from determined_amp.trial.batches import Batches
from tests.harness import fit, fit_as_it_is
from tests.run_here import ROOT
from tests.trials import FP16_SECTION, Weights

PAGE = ROOT / "docs" / "architecture.md"
LIBRARY = str(Path(determined_amp.__file__).parent)

# An ordinary batch: the first ones audit, and begin what is kept.
ORDINARY = 5


class TenLines(Weights):
    rows = ((1.0, 1.0),) * 8


class Unmodified(TenLines):
    """The same in float32, whose code knows nothing of mixed precision."""

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1, bias=False))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.optimizer = context.wrap_optimizer(sgd)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        clip = partial(clip_grad_norm_, max_norm=1.0)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)
        return {"loss": loss}

    def build_callbacks(self):
        return {}


@contextmanager
def walked(stations):
    """Note which file of the library is entered in this block, and by which call."""

    def note(frame, event, _):
        code = frame.f_code
        is_named = not code.co_name.startswith("<")  # 3.12 has no frames of the others
        is_ours = code.co_filename.startswith(LIBRARY)
        if event != "call" or not (is_named and is_ours):
            return
        file = Path(code.co_filename).stem
        if not stations or stations[-1].partition(".")[0] != file:
            stations.append(f"{file}.{code.co_name}")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def in_a_loop():
    amp = AmpLoop(AmpSettings(Precision.AMP_FP16, init_scale=4.0), "cpu")
    model = amp.prepare(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    def train():
        with amp.autocast():
            loss = model(torch.ones(2, 1)).float().mean()
        amp.scaler.scale(loss).backward()
        amp.clip_gradients(optimizer, max_norm=1.0)
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=2)

    for _ in range(ORDINARY):
        train()
    stations = []
    with walked(stations):
        train()
    return stations


def in_a_trial(train, patch):
    own, batches, stations = Batches.__call__, iter(range(100)), []

    def call(self, *args, **kwargs):
        if next(batches) != ORDINARY:
            return own(self, *args, **kwargs)
        with walked(stations):
            return own(self, *args, **kwargs)

    patch.setattr(Batches, "__call__", call)
    train()
    return stations


def shown(stations):
    return " → ".join(stations)


def test_page_shows_the_walk_of_an_ordinary_batch_in_each_form(monkeypatch):
    gc.collect()  # loops of other tests, which would be asked about each step
    page = " ".join(PAGE.read_text().replace("\n> ", " ").split())
    ten = in_a_trial(lambda: fit(TenLines, FP16_SECTION, batches=8), monkeypatch)
    monkeypatch.undo()
    unmodified = in_a_trial(lambda: fit_as_it_is(Unmodified, FP16_SECTION), monkeypatch)
    monkeypatch.undo()
    for stations in (in_a_loop(), ten, unmodified):
        assert shown(stations) in page, shown(stations)
