"""A multi-token-prediction head: drafts from a token and the main model's hidden state of the token before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.causal import CausalModel
from weightcast.engines.embedded.model.decoder import Decoder
from weightcast.engines.embedded.model.parallel import Ranks, RMSNorm
from weightcast.engines.embedded.model.weights import Layer, WeightLayout
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.settings import Experts
from weightcast.errors import InvalidInput


class MtpModel(Layer):
    """Tensors are named `mtp.*`. Embedding and head are the main model's, which is used and not owned."""

    fc: nn.Parameter
    ignored = ("model.embed_tokens.weight", "lm_head.weight")  # shared with the main model, whatever the checkpoint has

    def __init__(
        self, config: ModelConfig, main: CausalModel, ranks: Ranks, *, experts: Experts, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self._main = (main,)  # in a tuple, so that its parameters do not become parameters of this model
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = RMSNorm("mtp.pre_fc_norm_embedding.weight", hidden, eps, dtype)
        self.hidden_norm = RMSNorm("mtp.pre_fc_norm_hidden.weight", hidden, eps, dtype)
        self.declare("fc", WeightLayout.whole("mtp.fc.weight", (hidden, 2 * hidden)), dtype)
        self.decoder = Decoder(config, "mtp", ranks, experts=experts, dtype=dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, main_cache: KVCache | None = None) -> torch.Tensor:
        """The hidden states of all tokens, shape (tokens, hidden).

        Reads the hidden state of the token before each from `main_cache`, and puts its own of the tokens `batch.rows` there:
        the next draft step finds them, and the main model overwrites them when it checks the draft. `batch.replay` is the
        main model's and plays no part.
        """
        if main_cache is None or main_cache.hidden is None:
            raise InvalidInput("an MTP head needs the main model's cache, allocated with hidden states.")
        before = main_cache.hidden.index_select(0, _slots_before(batch, main_cache.block_size))
        before = before.masked_fill_((batch.positions == 0).unsqueeze(1), 0)
        embedded = self.embedding_norm.forward(self._main[0].embedding.embed(batch.tokens))
        joined = F.linear(torch.cat((embedded, self.hidden_norm.forward(before)), dim=1), self.fc)
        hidden = self.decoder.forward(joined, batch, cache, None)
        main_cache.hidden.index_copy_(0, batch.slots[batch.rows], hidden[batch.rows])
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The scores of this rank's part of the (padded) vocabulary for rows of hidden states, in float32."""
        return self._main[0].logits(hidden)


def _slots_before(batch: Batch, block_size: int) -> torch.Tensor:
    """The slot of the token before each token; any slot of the sequence where there is none."""
    counts = [stop - start for start, stop in zip(batch.starts, batch.starts[1:], strict=False)]
    sequences = torch.repeat_interleave(torch.tensor(counts)).to(batch.slots.device)
    before = (batch.positions - 1).clamp_(min=0)
    return batch.tables[sequences, before // block_size] * block_size + before % block_size
