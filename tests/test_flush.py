"""The low end of the safe range: gradients of float16 are still those of float32
there.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from determined_amp.amp.slots import OneSlot
from determined_amp.finder.model import rehearsals_of
from determined_amp.finder.scale_finding import Verdict, find_range

WORDS, TOKENS, WIDTH = 500, 32, 64


class Bert(nn.Module):
    """Classifies by the first of (B, 32) tokens, initialised as BERT is: attention is
    uniform.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0.0, 0.02)
            elif "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, words):
        return self.head(self.encoder(self.norm(self.embedding(words)))[:, 0])


def bert_batch():
    torch.manual_seed(0)
    model = Bert()
    words, labels = torch.randint(0, WORDS, (8, TOKENS)), torch.randint(0, 2, (8,))

    def loss(words):
        return functional.cross_entropy(model(words), labels)

    (rehearsal,) = rehearsals_of(model, loss, [words], torch.device("cpu"))
    return rehearsal


def gradients(rehearsal, scale_log2, dtype):
    """The parameters' gradients of a rehearsal, without the scale."""
    (model,) = rehearsal.models
    kept = []

    @contextmanager
    def keeping():
        yield
        kept.extend(
            p.grad.double() / 2.0**scale_log2
            for p in model.parameters()
            if p.grad is not None
        )

    rehearsal.run(2.0**scale_log2, dtype, watch=keeping())
    return kept


def gradient_error(rehearsal, scale_log2):
    """The mean over the parameters of the relative error in float16, at most 1 each."""
    exact = gradients(rehearsal, 0, torch.float32)
    scaled = gradients(rehearsal, scale_log2, None)
    errors = []
    for reference, gradient in zip(exact, scaled, strict=True):
        if reference.norm() > 0:
            error = (gradient - reference).norm() / reference.norm()
            errors.append(float(error.clamp(max=1.0)))
    return sum(errors) / len(exact)


def test_gradients_of_attention_are_as_good_at_the_ranges_low_end_as_at_its_top():
    batch = bert_batch()
    found = find_range([batch], OneSlot())
    assert found.verdict is Verdict.DEFAULT
    assert found.low_log2 <= 12
    low, top = (
        gradient_error(batch, scale) for scale in (found.low_log2, found.top_log2)
    )
    assert low <= top + 0.001
