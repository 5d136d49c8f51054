"""A GPT-NeoX as `transformers` has it, of several peers at once: each has a model and rows of its own.

One operation works on all peers, so four small models cost what one does on all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention
from transformers import GPTNeoXConfig

from recipes.weight_files import Layout

Named = dict[str, Tensor]  # each (N, ...)


class Models:
    """N models of one config, computed together.

    Args:
        layout: where each parameter lies in a model's vector.
        length: of a row.
        whole: makes models (N, P) of vectors in which something else is trained; None: models are trained.
    """

    def __init__(
        self,
        config: GPTNeoXConfig,
        layout: Layout,
        length: int,
        device: str = "cpu",
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self.layout, self.whole = config, layout, whole
        self.sizes = [b - a for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)]
        rope = config.rope_parameters
        width = int(config.hidden_size // config.num_attention_heads * rope["partial_rotary_factor"])
        speed = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = torch.arange(length).float()[:, None] * speed.repeat(2)  # (T, width)
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)

    def gradients(self, vectors: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the gradients (N, P) of each model's mean loss over its rows, all (B, T), and the losses
        (N,)."""
        x = torch.stack(list(vectors)).requires_grad_()
        losses = self.losses(x if self.whole is None else self.whole(x), torch.stack(list(rows)).to(x.device))
        (grad,) = torch.autograd.grad(losses.sum(), x)
        return grad, losses.detach()

    def losses(self, x: Tensor, rows: Tensor) -> Tensor:
        """(N,) the mean loss of the model x[i] (P,) over rows[i] (B, T)."""
        parts = zip(self.layout.names, x.split(self.sizes, 1), self.layout.shapes, strict=True)
        named = {name.removeprefix("gpt_neox."): part.unflatten(1, shape) for name, part, shape in parts}
        peers, count, length = rows.shape
        at = torch.arange(peers, device=rows.device)[:, None]
        h = named["embed_in.weight"][at, rows.flatten(1)]  # (N, B T, h)
        for layer in range(self.config.num_hidden_layers):
            h = self._layer(named, f"layers.{layer}.", h, count)
        h = self._norm(named, "final_layer_norm", h)
        logits = torch.bmm(h, named["lm_head.weight"].mT).unflatten(1, (count, length))[:, :, :-1]
        each = cross_entropy(logits.flatten(0, 2), rows[:, :, 1:].flatten(), reduction="none")
        return each.view(peers, -1).mean(1)

    def _layer(self, named: Named, name: str, h: Tensor, count: int) -> Tensor:
        """The attention and the MLP both work on h."""
        attended = self._attention(named, name, self._norm(named, name + "input_layernorm", h), count)
        inner = _linear(
            named, name + "mlp.dense_h_to_4h", self._norm(named, name + "post_attention_layernorm", h)
        )
        return _linear(named, name + "mlp.dense_4h_to_h", gelu(inner)) + attended + h

    def _attention(self, named: Named, name: str, h: Tensor, count: int) -> Tensor:
        peers, heads = len(h), self.config.num_attention_heads
        mixed = _linear(named, name + "attention.query_key_value", h)
        # (N, B T, 3 h) -> (N B, heads, T, 3 d)
        mixed = mixed.view(peers * count, -1, heads, 3 * h.shape[2] // heads).transpose(1, 2)
        q, k, v = mixed.chunk(3, -1)
        found = scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        return _linear(named, name + "attention.dense", found.transpose(1, 2).reshape(h.shape))

    def _turned(self, x: Tensor) -> Tensor:
        """Rotary positions on the first part of each head."""
        width = self.cos.shape[1]
        first, second = x[..., : width // 2], x[..., width // 2 : width]
        turned = x[..., :width] * self.cos + torch.cat((-second, first), -1) * self.sin
        return torch.cat((turned, x[..., width:]), -1)

    def _norm(self, named: Named, name: str, h: Tensor) -> Tensor:
        scaled = layer_norm(h, h.shape[-1:], eps=self.config.layer_norm_eps)
        return torch.addcmul(named[name + ".bias"][:, None], scaled, named[name + ".weight"][:, None])


def _linear(named: Named, name: str, h: Tensor) -> Tensor:
    """(N, R, in) -> (N, R, out)."""
    return torch.baddbmm(named[name + ".bias"][:, None], h, named[name + ".weight"].mT)
