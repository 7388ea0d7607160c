"""The traps of updating vLLM live: each test shows that one is there, with a naive backend, and that ours is not in it."""

from __future__ import annotations

import pytest
from inprocess import open_llm, run, tokens
from models import greedy, published

from weightcast import Store

PROMPT = [5, 6, 7, 8]
LONG = [7 + index * 13 % 400 for index in range(400)]
N = 16


@pytest.fixture(scope="session")
def versions(tmp_path_factory, model_a, model_b, one_projection, nudged_once):
    """A store with two full versions, and deltas: in one projection of a fused group, and in all tensors."""
    path = tmp_path_factory.mktemp("store") / "s"
    store = Store(path)
    published(store, "a", model_a, mode="full")
    assert published(store, "projection", one_projection, mode="delta").kind == "delta"
    assert published(store, "nudged", nudged_once, mode="delta").kind == "delta"
    published(store, "b", model_b, mode="full")
    return f"file://{path}"


def naive_llm(folder, backend):
    import naive

    naive.register()
    return open_llm(folder, backend=backend)


def begin(llm, version, source):
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "source": source}})


def update(llm, version, source):
    begin(llm, version, source)
    llm.finish_weight_update(version)


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# -- packed parameters -------------------------------------------------------------------------------------------------


def load_plainly(folder, new):
    llm = naive_llm(folder, "plain")
    llm.start_weight_update()
    return error_of(llm.update_weights, {"update_info": {"folder": new}})


def test_parameters_that_were_packed_cannot_be_loaded_in_place(model_a, model_b):
    assert "Attempted to load weight" in run(load_plainly, model_a, model_b)


# -- the model between start and finish ---------------------------------------------------------------------------------


def step_before_finish(folder, backend, info):
    llm = naive_llm(folder, backend)
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    return error_of(tokens, llm, PROMPT, N)


def answers_before_finish(folder, source):
    llm = open_llm(folder)
    begin(llm, "b", source)
    before = tokens(llm, PROMPT, N)
    llm.finish_weight_update("b")
    return before, tokens(llm, PROMPT, N)


def test_the_engine_runs_on_between_start_and_finish(versions, model_a, model_b):
    one = {"folder": str(model_b), "names": ["model.norm.weight"]}
    assert run(step_before_finish, model_a, "layerwise", one) is not None, "the trap is gone: a step survives meta tensors"
    before, after = run(answers_before_finish, model_a, versions)
    assert before == greedy(model_a, PROMPT, N)
    assert after == greedy(model_b, PROMPT, N)


# -- parts of fused modules ---------------------------------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj.weight"


def send_one_projection(folder, new):
    llm = naive_llm(folder, "layerwise")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"folder": new, "names": [Q]}})
    llm.finish_weight_update("x")
    return tokens(llm, PROMPT, N)


def follow_one_projection(folder, source):
    import json

    llm = open_llm(folder)
    update(llm, "a", source)
    update(llm, "projection", source)
    return tokens(llm, PROMPT, N), json.loads(llm.collective_rpc("weightcast_status")[0])


def test_a_projection_alone_is_completed_from_the_copy(versions, model_b, model_a, one_projection):
    expected = greedy(one_projection, PROMPT, N)
    assert run(send_one_projection, model_a, one_projection) != expected, "the trap is gone: half a group is loaded right"
    said, status = run(follow_one_projection, model_b, versions)
    assert said == expected
    assert status["layers"] == 1  # and no other layer was made anew


# -- tied embeddings ----------------------------------------------------------------------------------------------------


def reload_from_disk(folder, new):
    llm = open_llm(folder, backend=None)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": new})
    llm.reset_prefix_cache()
    return tokens(llm, PROMPT, N)


def test_vllms_own_reload_leaves_a_tied_head_behind(tied_a, tied_b):
    """Ours does not: see the tied models in test_inprocess."""
    assert run(reload_from_disk, tied_a, tied_b) != greedy(tied_b, PROMPT, N), "the trap is gone: it could be done simpler"


# -- the prefix cache ---------------------------------------------------------------------------------------------------


def ask_twice(folder, source, *, hooked):
    if not hooked:
        import weightcast.engines.vllm.backend as backend
        import weightcast.engines.vllm.plugin as plugin

        backend.install_core_hooks = plugin.install_core_hooks = lambda: None
    llm = open_llm(folder)
    first = tokens(llm, LONG, N)
    update(llm, "b", source)
    return first, tokens(llm, LONG, N)


def test_a_prompt_is_not_answered_from_the_cache_of_the_old_weights(versions, model_a, model_b):
    _, stale = run(ask_twice, model_a, versions, hooked=False)
    assert stale != greedy(model_b, LONG, N), "the trap is gone: vLLM resets its cache itself"
    old, new = run(ask_twice, model_a, versions, hooked=True)
    assert old == greedy(model_a, LONG, N)
    assert new == greedy(model_b, LONG, N)


# -- finish that fails, finish that does not come -----------------------------------------------------------------------


def fail_naively(folder, new):
    llm = naive_llm(folder, "raising")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"folder": new}})
    return error_of(llm.finish_weight_update, "x"), error_of(llm.start_weight_update)


def fail_and_go_on(folder, source, commit):
    """Make the commit fail after some layers; then update again."""
    from weightcast.engines.vllm import commits, layers

    llm = open_llm(folder)
    llm.init_weight_transfer_engine({"init_info": {"commit": commit}})
    update(llm, "a", source)
    said, seen = [], []
    if commit == "switch":
        switch = layers.MadeLayer.switch

        def failing(self, undo):
            switch(self, undo)
            seen.append(self.path)
            if len(seen) == 10:
                raise RuntimeError("a layer cannot be switched")

        layers.MadeLayer.switch = failing
    else:
        finalize = commits.finalize_layerwise_reload

        def failing(*args):
            seen.append("finalize")
            if len(seen) == 1:
                raise RuntimeError("the reload breaks off")
            finalize(*args)

        commits.finalize_layerwise_reload = failing
    begin(llm, "b", source)
    said.append(error_of(llm.finish_weight_update, "b"))
    said.append(llm.get_weight_version())
    said.append(tokens(llm, PROMPT, N))
    if commit == "switch":
        layers.MadeLayer.switch = switch
    update(llm, "b", source)
    said.append(tokens(llm, PROMPT, N))
    update(llm, "nudged", source)
    said.append(tokens(llm, PROMPT, N))
    return said


@pytest.mark.parametrize("commit", ["switch", "reload"])
def test_a_finish_that_fails_leaves_the_old_weights_and_the_next_update_works(
    versions, model_a, model_b, nudged_once, commit
):
    error, version, old, new, last = run(fail_and_go_on, model_b, versions, commit)
    assert "failed and was undone" in error
    assert "holds a as before" in error
    assert version == "a"
    assert old == greedy(model_a, PROMPT, N)
    assert new == greedy(model_b, PROMPT, N)
    assert last == greedy(nudged_once, PROMPT, N)


def test_after_a_finish_that_fails_vllm_itself_takes_no_update(model_a, model_b):
    first, second = run(fail_naively, model_a, model_b)
    assert "finish fails" in first
    assert "already" in second, "the trap is gone: vLLM closes an update whose finish failed"


def leave_open(folder, source):
    llm = open_llm(folder)
    begin(llm, "b", source)
    still = tokens(llm, PROMPT, N)
    update(llm, "nudged", source)
    return still, tokens(llm, PROMPT, N)


def test_an_update_without_its_finish_is_dropped_for_the_next(versions, model_a, nudged_once):
    still, after = run(leave_open, model_a, versions)
    assert still == greedy(model_a, PROMPT, N)
    assert after == greedy(nudged_once, PROMPT, N)


# -- registration -------------------------------------------------------------------------------------------------------


def register_often():
    import sys

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from weightcast.engines.vllm.plugin import register

    for _ in range(3):
        register()
    again = error_of(WeightTransferEngineFactory.register_engine, "weightcast", "x", "y")
    return again, "weightcast" in WeightTransferTrainerFactory._registry, "numba" in sys.modules


def test_the_plugin_may_be_loaded_any_number_of_times():
    again, trainer, numba = run(register_often)
    assert "already registered" in again
    assert trainer
    assert not numba  # vLLM's engine cannot be made on CPU where that was imported before


# -- spans --------------------------------------------------------------------------------------------------------------


def spans(folder, source):
    from vllm import SamplingParams

    llm = open_llm(folder)
    update(llm, "a", source)
    begin(llm, "b", source)
    llm.finish_weight_update()  # the caller does not name it; it is known all the same
    made = llm.generate(
        [{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=N, ignore_eos=True), use_tqdm=False
    )
    return [(span.version, span.start, span.end) for span in made[0].outputs[0].weight_versions]


def test_every_output_says_which_version_made_its_tokens(versions, model_a):
    assert run(spans, model_a, versions) == [["b", 0, N]]
