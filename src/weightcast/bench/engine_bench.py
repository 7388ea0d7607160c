"""The bench of the embedded engine: its tokens per second over HTTP beside those of `transformers.generate`.

Both make the same greedy tokens from the same prompts, in turn in one run, and their answers are compared. The engine's
figure holds everything: HTTP, JSON, the front end, the way to the ranks and back. Prompts are new in every round, so no
prefix is found in a cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast import logs
from weightcast.bench.report import Report, Target, this_machine
from weightcast.bench.served import Client, Tokens, served
from weightcast.bench.timing import interleaved
from weightcast.engines.embedded.presets import Preset, init_checkpoint
from weightcast.errors import MissingExtra

log = logs.get(__name__)

Progress = Callable[[str], None]

PROMPT_TOKENS = 32
PRINTABLE = (32, 127)


@dataclass(frozen=True)
class EngineSettings:
    """What is measured. Targets are asserted for one rank: two share the cores that `transformers` has alone."""

    presets: tuple[Preset, ...] = ("tiny", "small")
    widths: tuple[int, ...] = (1, 8)
    ranks: tuple[int, ...] = (1, 2)
    tokens: int = 96
    rounds: int = 5
    seed: int = 0
    quick: bool = False


QUICK = EngineSettings(presets=("tiny",), widths=(1, 2), ranks=(1,), tokens=16, rounds=2, quick=True)


@dataclass(frozen=True)
class EngineRow:
    """One preset at one number of requests at once. Speeds are those of the fastest round."""

    preset: str
    ranks: int
    width: int
    tokens_per_s: float
    transformers_tokens_per_s: float
    over_transformers: float
    same_tokens: float

    @property
    def name(self) -> str:
        """What its targets are called after."""
        return f"{self.preset}.{self.ranks}_ranks.{self.width}_at_once"


def run_engine_bench(settings: EngineSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `MissingExtra` without `transformers`."""
    rows: list[EngineRow] = []
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as scratch:
        for preset in settings.presets:
            model_dir = Path(scratch) / preset
            init_checkpoint(model_dir, preset, seed=settings.seed)
            rival = Rival(model_dir)
            for ranks in settings.ranks:
                progress(f"{preset}: {ranks} rank(s)")
                with served(model_dir, ranks=ranks, scratch=Path(scratch)) as serving:
                    rows += [_row(settings, preset, ranks, width, serving.port, rival) for width in settings.widths]
    return Report(
        bench="engine",
        machine=this_machine(),
        settings=asdict(settings),
        rows=[asdict(row) for row in rows],
        targets=_targets(rows, asserted=not settings.quick),
        notes=[
            f"greedy; {PROMPT_TOKENS} tokens of prompt, {settings.tokens} of answer; fastest of {settings.rounds} rounds",
        ],
    )


def _targets(rows: list[EngineRow], *, asserted: bool) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    for row in rows:
        targets[f"{row.name}.over_transformers"] = Target(
            row.over_transformers, 1.0, "least", asserted=asserted and row.ranks == 1
        )
        targets[f"{row.name}.same_tokens"] = Target(row.same_tokens, 1.0, "least")
    return targets


class Rival:
    """`transformers.generate` on the same checkpoint, as its documentation says: float32, greedy, with its cache."""

    def __init__(self, model_dir: Path) -> None:
        try:
            import torch  # noqa: PLC0415 - an extra
            from transformers import AutoModelForCausalLM  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtra("transformers", "bench", "comparing the engine") from error
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)  # in evaluation mode
        self._model.generation_config.eos_token_id = None  # neither side stops early, and neither pays for looking

    def generate(self, prompts: list[Tokens], *, tokens: int) -> list[Tokens]:
        """The greedy answers to prompts of equal length."""
        inputs = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            answers = self._model.generate(
                inputs, attention_mask=self._torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        kept: list[Tokens] = answers[:, inputs.shape[1] :].tolist()
        return kept


class _Turns:
    """Gives one side its prompts, other ones at every call and the same for both sides, and keeps the last answers."""

    def __init__(self, generate: Callable[..., list[Tokens]], settings: EngineSettings, width: int) -> None:
        self._generate, self._settings, self._width = generate, settings, width
        self._random = np.random.default_rng((settings.seed, width))
        self.answers: list[list[Tokens]] = []

    def __call__(self) -> None:
        prompts = self._random.integers(*PRINTABLE, size=(self._width, PROMPT_TOKENS)).tolist()
        self.answers.append(self._generate(prompts, tokens=self._settings.tokens))


def _row(settings: EngineSettings, preset: str, ranks: int, width: int, port: int, rival: Rival) -> EngineRow:
    client = Client(port, preset, width=width)
    try:
        ours, theirs = _Turns(client.generate, settings, width), _Turns(rival.generate, settings, width)
        taken = interleaved({"engine": ours, "transformers": theirs}, rounds=settings.rounds)
    finally:
        client.close()
    made = width * settings.tokens
    speed, rival_speed = made / taken["engine"].minimum, made / taken["transformers"].minimum
    same = float(np.mean(np.array(ours.answers) == np.array(theirs.answers)))
    return EngineRow(preset, ranks, width, speed, rival_speed, speed / rival_speed, same)
