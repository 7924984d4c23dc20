"""The model's configuration, and a cross-entropy that never holds all logits at once."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from . import attention
from .tokenizer import SPECIAL, VOCABULARY

CONTEXT = 2048


def config() -> LlamaConfig:
    """Six layers, 256 wide, four query heads on two KV heads of 64: 5.2 M parameters.

    Wide heads rather than many: a key has to hold two names at once. The rotation is slow (theta 1e5) so
    that enough dimensions of a key mean the same at any distance within the context.
    """
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<|pad|>"),
        bos_token_id=SPECIAL.index("<|begin|>"),
        eos_token_id=SPECIAL.index("<|end|>"),
        dtype="bfloat16",
    )


def build(seed: int, device: str) -> LlamaForCausalLM:
    """A fresh model in bfloat16; the optimizer holds the float32 weights."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config())
    model.set_attn_implementation(attention.NAME)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=(0.25 if residual else 1.0) * parameter.shape[1] ** -0.5)
    return model.to(device=device, dtype=torch.bfloat16)


class WeightedLoss(torch.autograd.Function):
    """Sum of weighted cross-entropies; the gradient is formed in the forward pass, chunk by chunk.

    Logits of 8 192 tokens over 4 096 words are 128 MiB in float32; written once and read five times they
    cost more on a CPU than the matrix products that make them.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, weights, chunk=512):  # noqa: ANN205, D102
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=weight.device)
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            logits = (hidden[part] @ weight.t()).float()
            log_sum = torch.logsumexp(logits, -1, keepdim=True)
            target = targets[part, None]
            losses[part] = (log_sum - logits.gather(1, target))[:, 0]
            grad = logits.sub_(log_sum).exp_()
            grad.scatter_add_(1, target, -torch.ones_like(target, dtype=grad.dtype))
            grad = grad.mul_(weights[part, None]).to(hidden.dtype)
            d_hidden[part] = grad @ weight
            d_weight += grad.t() @ hidden[part]
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, d_total, _):  # noqa: ANN205, D102
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_total, d_weight * d_total, None, None, None


def losses(model: LlamaForCausalLM, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the losses of rows, and the loss of every token but the first of each row."""
    hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
    total, each = WeightedLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        model.lm_head.weight,
        rows[:, 1:].reshape(-1),
        weights[:, 1:].reshape(-1),
    )
    return total, each.view(rows.shape[0], -1)
