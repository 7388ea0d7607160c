"""The language model: embedding, decoder, head."""

from __future__ import annotations

import torch

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.decoder import Decoder
from weightcast.engines.embedded.model.parallel import Ranks, VocabParallel
from weightcast.engines.embedded.model.weights import Layer
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.settings import Experts


class CausalModel(Layer):
    """Qwen3 or Qwen3-MoE on one rank. A tied head is the embedding itself: the same parameter, declared once."""

    def __init__(self, config: ModelConfig, ranks: Ranks, *, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = VocabParallel("model.embed_tokens.weight", shape, ranks, dtype=dtype)
        self.decoder = Decoder(config, "model", ranks, experts=experts, dtype=dtype)
        self.head = self.embedding if config.tied else VocabParallel("lm_head.weight", shape, ranks, dtype=dtype)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that a checkpoint may have and this model does not load: a copy of the tied head, and an
        MTP head, which is a model of its own."""
        return ("lm_head.weight", "mtp.*") if self.config.tied else ("mtp.*",)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, main_cache: KVCache | None = None) -> torch.Tensor:  # noqa: ARG002
        """The final hidden states of all tokens of the batch, shape (tokens, hidden).

        `main_cache` is there so that it can be called like an MTP head, and plays no part.
        """
        hidden = self.decoder.forward(self.embedding.embed(batch.tokens), batch, cache, batch.replay)
        if cache.hidden is not None:
            cache.hidden.index_copy_(0, batch.slots, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The scores of this rank's part of the (padded) vocabulary for rows of hidden states, in float32."""
        return self.head.logits(hidden)
