"""Live updates of an engine inside a process: its greedy tokens afterwards are those of `transformers`."""

from __future__ import annotations

import pytest
from inprocess import open_llm, run, tokens
from models import greedy, published

from weightcast import Store

PROMPT = [5, 6, 7, 8]
LONG = [7 + index * 13 % 400 for index in range(400)]
N = 24


def updated(llm, version, source, **info):
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "source": source, **info}})
    llm.finish_weight_update(version)


def walk(folder, source, versions, **options):
    """Tokens before any update and after each; then what the workers say."""
    init = options.pop("init", None)
    llm = open_llm(folder, **options)
    said = [tokens(llm, PROMPT, N)]
    if init is not None:
        llm.init_weight_transfer_engine({"init_info": init})
    for version in versions:
        updated(llm, version, source)
        said.append(tokens(llm, PROMPT, N))
        assert llm.get_weight_version() == version
    return said, llm.collective_rpc("weightcast_status")


@pytest.fixture(scope="session")
def tied_steps(tmp_path_factory, tied_a, tied_b):
    path = tmp_path_factory.mktemp("store") / "s"
    store = Store(path)
    published(store, "a", tied_a, mode="full")
    published(store, "b", tied_b, mode="full")
    return f"file://{path}"


@pytest.mark.parametrize("commit", ["switch", "reload"])
def test_full_versions_and_deltas_become_what_transformers_says(steps, model_a, model_b, nudged_once, nudged_twice, commit):
    said, status = run(walk, model_b, steps, ["step_0", "step_1", "step_2", "other", "step_2"], init={"commit": commit})
    folders = [model_b, model_a, nudged_once, nudged_twice, model_b, nudged_twice]
    assert said == [greedy(folder, PROMPT, N) for folder in folders]
    assert f'"mode": "{commit}"' in status[0]
    assert len({tuple(tokens) for tokens in said}) == 4


@pytest.mark.parametrize("commit", ["switch", "reload"])
def test_tied_embeddings_follow_in_the_head_too(tied_steps, tied_a, tied_b, commit):
    said, _ = run(walk, tied_a, tied_steps, ["b", "a", "b"], init={"commit": commit})
    assert said == [greedy(folder, PROMPT, N) for folder in (tied_a, tied_b, tied_a, tied_b)]


def test_compiled_code_sees_the_new_weights(steps, model_a, model_b, nudged_once):
    said, _ = run(walk, model_b, steps, ["step_0", "step_1", "other"], enforce_eager=False)
    assert said == [greedy(folder, PROMPT, N) for folder in (model_b, model_a, nudged_once, model_b)]


def walk_with_a_reload_between(folder, source, other):
    llm = open_llm(folder)
    updated(llm, "step_0", source)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    llm.reset_prefix_cache()
    reloaded = tokens(llm, PROMPT, N)
    updated(llm, "step_0", source)  # which differs in nothing from what was committed last
    return reloaded, tokens(llm, PROMPT, N)


def test_a_version_is_loaded_whole_after_vllm_has_loaded_something_else(steps, model_a, model_b):
    """What was committed last is not what the model holds: layers that are the same in both must be loaded, too."""
    reloaded, after = run(walk_with_a_reload_between, model_a, steps, model_b)
    assert reloaded == greedy(model_b, PROMPT, N)
    assert after == greedy(model_a, PROMPT, N)
