"""The front door of the model: from a config to layers with memory."""

from __future__ import annotations

import torch

from weightcast.engines.embedded.model.causal import CausalModel
from weightcast.engines.embedded.model.mtp import MtpModel
from weightcast.engines.embedded.model.parallel import Ranks
from weightcast.engines.embedded.model.weights import materialize
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.settings import Experts
from weightcast.errors import InvalidInput, UnsupportedModel

Model = CausalModel | MtpModel


def build_model(
    config: ModelConfig,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    experts: Experts = "sharded",
    main: CausalModel | None = None,
) -> Model:
    """The part of a model that belongs to this rank, with memory on `device` and all weights 0 until it is loaded.

    On the `meta` device nothing is allocated: `materialize` does that later. `main` is the model that a draft works for; an
    MTP head uses its embedding and head. Raises `UnsupportedModel` if it cannot be divided over the ranks or does not go
    with `main`.
    """
    config.check_ranks(ranks.size, experts=experts)
    _check_draft(config, main)
    model: Model
    if config.mtp and main is not None:
        model = MtpModel(config, main, ranks, experts=experts, dtype=dtype)
    else:
        model = CausalModel(config, ranks, experts=experts, dtype=dtype)
    materialize(model, device)
    return model.eval()


def _check_draft(config: ModelConfig, main: CausalModel | None) -> None:
    if main is None:
        if config.mtp:
            raise InvalidInput("an MTP head cannot run alone: give it as the draft of its main model.")
        return
    names = ("vocab_size", "hidden_size") if config.mtp else ("vocab_size",)
    problems = [
        f"{name} is {getattr(config, name)}, the main model's is {getattr(main.config, name)}"
        for name in names
        if getattr(config, name) != getattr(main.config, name)
    ]
    if problems:
        raise UnsupportedModel("the draft does not go with the main model:" + "".join(f"\n  {one}" for one in problems))
