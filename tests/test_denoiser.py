"""`models.denoiser`: the transformer, and checkpointing that changes no bit."""

import pytest
import torch
from torch import nn

from trials.data.clips import ClipSettings
from trials.models.denoiser import Denoiser, DenoiserSettings

CLIPS = ClipSettings(image_size=8, frames=3, classes=2, channels=2)
TINY = DenoiserSettings(
    num_layers=2,
    num_attention_heads=2,
    attention_head_dim=8,
    patch_size=4,
    class_tokens=3,
)
CLIP, TIMESTEP, LABEL = (
    torch.randn(2, 2, 3, 8, 8),
    torch.tensor([3, 900]),
    torch.tensor([0, 2]),
)


def make():
    """With random weights everywhere: at first most gradients of a new model are 0."""
    torch.manual_seed(1)
    model = Denoiser(TINY, CLIPS, gradient_checkpointing=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("what", ["timestep", "label", "frame"])
def test_denoiser_depends_on_everything_it_is_given(what):
    model = make()
    before = model(CLIP, TIMESTEP, LABEL)
    clip, timestep, label = CLIP.clone(), TIMESTEP.clone(), LABEL.clone()
    if what == "timestep":
        timestep[0] += 1
    elif what == "label":
        label[0] = 1
    else:
        clip[0, :, 2] += 1.0
    after = model(clip, timestep, label)
    assert not torch.allclose(after[0, :, 0], before[0, :, 0], rtol=0, atol=1.0e-6)
    torch.testing.assert_close(after[1], before[1])
