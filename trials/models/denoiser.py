"""The video diffusion transformer Latte (Ma et al. 2024, arXiv 2401.03048).

Spatial blocks, which attend within a frame, alternate with temporal blocks, which
attend along time. The transformer is `diffusers.LatteTransformer3DModel`. This module
sets the paper's initial weights, and replaces the text encoder by learned tokens: the
spatial blocks attend to a few tokens per class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from determined_amp import ConfigError
from determined_amp.amp.fields import setting
from trials.data.clips import ClipSettings

try:
    # diffusers imports lazily, so a version that does not fit this torch fails here.
    from diffusers import LatteTransformer3DModel
except (ImportError, AttributeError, RuntimeError) as error:
    raise ImportError(
        "Latte needs the package diffusers: pip install diffusers, "
        "or 'diffusers<0.36' where torch has no torch.accelerator (2.5 and older). "
        f"What failed: {str(error).strip().splitlines()[-1]}"
    ) from error


@dataclass(frozen=True)
class DenoiserSettings:
    """The `model` section of the hyperparameters; names as in diffusers.

    Args:
        num_layers: Pairs of a spatial and a temporal block; the paper counts single
            blocks.
        num_attention_heads: Number of heads in every attention.
        attention_head_dim: Features of a head; the width is this times the heads.
        patch_size: Side of the square that becomes one token, in pixels or latent
            cells.
        class_tokens: Learned tokens per class that the spatial blocks attend to. With a
            single token the softmax is always 1, so queries and keys learn nothing.
        dropout: Dropout probability in attention and feed-forward.
    """

    num_layers: int = setting(at_least=1)
    num_attention_heads: int = setting(at_least=1)
    attention_head_dim: int = setting(at_least=2)
    patch_size: int = setting(2, at_least=1)
    class_tokens: int = setting(4, at_least=1)
    dropout: float = setting(0.0, at_least=0, below=1)

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.width % 4:
            yield (
                "attention_head_dim",
                f"got {self.attention_head_dim} x {self.num_attention_heads} heads, a "
                f"width of {self.width}; allowed: a multiple of 4, for sine and cosine "
                "of two coordinates",
            )


class Denoiser(nn.Module):
    """Predicts the noise in a clip.

    Args:
        settings: Size of the transformer.
        clips: Shape of the clips and number of classes.
        gradient_checkpointing: Whether to keep only the inputs of the blocks, and
            recompute the rest in the backward. This saves memory, but needs about a
            third more matmuls.

    Raises:
        ConfigError: if `patch_size` does not divide the side of a frame.
    """

    def __init__(
        self,
        settings: DenoiserSettings,
        clips: ClipSettings,
        *,
        gradient_checkpointing: bool,
    ) -> None:
        super().__init__()
        if clips.image_size % settings.patch_size:
            raise ConfigError(
                "experiment configuration",
                [
                    f"hyperparameters.model.patch_size: got {settings.patch_size}, "
                    f"which does not divide data.image_size {clips.image_size}; "
                    "allowed: a divisor of it"
                ],
            )
        self.null_label = clips.classes
        self._tokens = (settings.class_tokens, settings.width)
        self.class_tokens = nn.Embedding(
            clips.classes + 1, settings.class_tokens * settings.width
        )
        self.transformer = LatteTransformer3DModel(
            num_layers=settings.num_layers,
            num_attention_heads=settings.num_attention_heads,
            attention_head_dim=settings.attention_head_dim,
            patch_size=settings.patch_size,
            dropout=settings.dropout,
            in_channels=clips.channels,
            out_channels=clips.channels,
            sample_size=clips.image_size,
            video_length=clips.frames,
            cross_attention_dim=settings.width,
            caption_channels=settings.width,
            attention_bias=True,
            activation_fn="gelu-approximate",
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1.0e-6,
        )
        initialize(self.transformer)
        if gradient_checkpointing:
            # Non-reentrant checkpoints recompute a block under the autocast state of
            # its forward.
            self.transformer.enable_gradient_checkpointing(
                partial(checkpoint, use_reentrant=False)
            )

    def forward(
        self, clips: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Predict the noise.

        Args:
            clips: Noisy clips, (B, C, F, S, S), float32.
            timesteps: (B,), int64.
            labels: (B,), int64; `null_label` for a clip of unknown class.

        Returns:
            (B, C, F, S, S), in the autocast dtype, or float32 without autocast.
        """
        # (B, tokens, width)
        tokens = self.class_tokens(labels).unflatten(1, self._tokens)
        noise: torch.Tensor = self.transformer(
            clips, timesteps, tokens, return_dict=False
        )[0]
        return noise


def initialize(transformer: LatteTransformer3DModel) -> None:
    """Set the initial weights of DiT (Peebles and Xie 2023, arXiv 2212.09748).

    Latte starts with the same: every block is the identity (adaLN-Zero), and the
    predicted noise is 0. diffusers, made for trained weights, keeps torch's defaults.
    """
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    patches = transformer.pos_embed.proj
    nn.init.xavier_uniform_(patches.weight.flatten(1))
    nn.init.zeros_(patches.bias)
    embedder = transformer.adaln_single.emb.timestep_embedder
    nn.init.normal_(embedder.linear_1.weight, std=0.02)
    nn.init.normal_(embedder.linear_2.weight, std=0.02)
    blocks = [*transformer.transformer_blocks, *transformer.temporal_transformer_blocks]
    for block in blocks:
        nn.init.zeros_(block.scale_shift_table)
        # The attention to class tokens has no gate, so its output starts at 0.
        if block.attn2 is not None:
            nn.init.zeros_(block.attn2.to_out[0].weight)
    nn.init.zeros_(transformer.adaln_single.linear.weight)
    nn.init.zeros_(transformer.scale_shift_table)
    nn.init.zeros_(transformer.proj_out.weight)
