"""A decoder-only transformer with GPT-2's parts, so that its 12 layers of 768 have GPT-2's 124,439,808 parameters.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3; sizes and initialisation as in the published
code. x_l is what layer l is given, one row a position, N a LayerNorm:

    y_l = x_l + A(N(x_l)),   x_{l+1} = y_l + M(N'(y_l)),   logits = N''(x_L) Eᵀ

A is causal attention (Vaswani et al. 2017, arXiv 1706.03762), M one hidden layer of four times the width with GELU. The norms
come before the layers ("pre-norm", Xiong et al. 2020, arXiv 2002.04745), which needs no long warm-up. E is the table of the
tokens' vectors, used at both ends (weight tying: Press & Wolf 2017, arXiv 1608.05859), or a matrix of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_gossip import ConfigurationError

_STD = 0.02  # of all weights at the beginning; GPT-2's


class CausalSelfAttention(nn.Module):
    """Each position looks at itself and at those before it.

    Args:
        width: of a position's vector; a multiple of ``heads``.
        heads: that look at width ÷ heads numbers each.
        dropout: of the attention and of its output, while it trains.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.queries_keys_values(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = self.projection(y.transpose(1, 2).reshape(batch, length, width))
        return functional.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """A layer: attention, then one hidden layer for each position by itself; both are added to what comes in.

    Args:
        width, heads, dropout: see :class:`CausalSelfAttention`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.expansion = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden = functional.gelu(self.expansion(self.mlp_norm(x)), approximate="tanh")
        added: Tensor = self.dropout(self.projection(hidden))
        return x + added


class Transformer(nn.Module):
    """Tokens, batch × length, to logits of the next token at each position, batch × length × vocabulary.

    Args:
        vocabulary: how many different tokens there are.
        sequence_length: the largest length.
        layers, heads, width: its size.
        dropout: while it trains.
        tie_weights: whether the matrix before the logits is the table of the tokens' vectors.

    Raises:
        ConfigurationError: for a width that the heads cannot share.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        sequence_length: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigurationError(f"width={width} is not a multiple of heads={heads}. Write for example width={64 * heads}.")
        self.sequence_length = sequence_length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)
        if tie_weights:
            self.head.weight = self.tokens.weight

    def _initialise(self, layers: int) -> None:
        """As GPT-2: 2 · layers branches are added up, so the last matrix of each begins smaller by the root of that."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                scale = (2 * layers) ** -0.5 if name.endswith("projection") else 1.0
                nn.init.normal_(module.weight, std=_STD * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.sequence_length:
            raise ConfigurationError(f"a sequence has {length} tokens and the model positions for {self.sequence_length}.")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits
