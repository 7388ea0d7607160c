"""Functions run in a fresh process, with vLLM's engine inside that process: no test changes what the next one sees.

    def ask_twice(folder):
        llm = open_llm(folder)
        return [tokens(llm, [5, 6, 7, 8], 16) for _ in range(2)]

    def test_it_says_the_same_twice(model_a):
        first, second = run(ask_twice, model_a)

The function is imported by its name, so it stands at the top level of a file of this folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import HERE, OwnProcess

RUN_S = 240
CHILDREN_S = 3
ANSWER = "answer.json"


def run(
    function: Callable[..., Any] | str,
    *args: Any,
    timeout_s: float = RUN_S,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function of a module in this folder in a process of its own, and return what it returns.

    `function` is the function itself or `module:name`. Arguments and the result are JSON; a Path becomes its string. The
    process must leave nothing behind: no process, and in /dev/shm nothing but what vLLM itself is known to leave.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    search = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    question = json.dumps([name, args, kwargs], default=os.fspath)
    environ = {"PYTHONPATH": search, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(env or {})}
    child = OwnProcess([sys.executable, "-m", "inprocess", question], environ)
    try:
        status = child.wait_end(timeout_s)
        answer = child.tmp_dir / ANSWER
        result = json.loads(answer.read_text()) if status == 0 else None
        left = child.end(children_s=CHILDREN_S)
    finally:
        child.kill()
    assert status == 0, f"{name} ended with {status}. It said:\n{child.said()}"
    assert not left, f"{name} left behind: {left}. It said:\n{child.said()}"
    return result


def open_llm(folder: Path | str, **options: Any) -> Any:
    """vLLM's engine inside this process. `options` add to the usual ones; `backend=None` is one without weight transfer."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    backend = options.pop("backend", "weightcast")
    transfer = {} if backend is None else {"weight_transfer_config": WeightTransferConfig(backend=backend)}
    usual = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True, "disable_log_stats": True}
    return LLM(model=str(folder), **{**usual, **transfer, **options})


def tokens(llm: Any, prompt: Sequence[int], n: int) -> list[int]:
    """The `n` tokens of a greedy completion, past any end of text."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    made = llm.generate([{"prompt_token_ids": list(prompt)}], settings, use_tqdm=False)
    return list(made[0].outputs[0].token_ids)


def _main(question: str) -> None:
    name, args, kwargs = json.loads(question)
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(module), function)(*args, **kwargs)
    Path(os.environ["TMPDIR"], ANSWER).write_text(json.dumps(result, default=os.fspath))


if __name__ == "__main__":  # the workers of several ranks import this again
    _main(sys.argv[1])
