"""Live updates of an engine inside a process: its greedy tokens afterwards are those of `transformers`."""

from __future__ import annotations

import gc
import json

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


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory, model_a, one_projection):
    """A store with `model_a`, a delta that changes one query projection, and a delta that changes it back."""
    path = tmp_path_factory.mktemp("store") / "s"
    store = Store(path)
    published(store, "all", model_a, mode="full")
    assert published(store, "one", one_projection, mode="delta").kind == "delta"
    assert published(store, "back", model_a, mode="delta").kind == "delta"
    return f"file://{path}"


def count_loads(folder, source, versions, *, packs=True, also=lambda _: None):
    """How many linear layers were processed for each version, and what the worker says. `also` is done to each of them."""
    import vllm.model_executor.layers.utils as gemm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    packed, process = [], UnquantizedLinearMethod.process_weights_after_loading

    def count(self, layer):
        packed[-1] += 1
        process(self, layer)
        also(layer)

    if not packs:  # as on a CPU without instructions for the dtype
        gemm.ops._supports_onednn, gemm.check_cpu_sgl_kernel = False, lambda *_: False
    llm = open_llm(folder)
    UnquantizedLinearMethod.process_weights_after_loading = count
    said = []
    for version in versions:
        packed.append(0)
        updated(llm, version, source)
        (status,) = llm.collective_rpc("weightcast_status")
        said.append([packed[-1], json.loads(status)["layers"], tokens(llm, PROMPT, N)])
    return said


def test_only_layers_that_changed_are_loaded_and_fused_ones_whole(one_layer, model_a, one_projection):
    first, one, back = run(count_loads, model_a, one_layer, ["all", "one", "back"])
    assert first[0] == 4 * 4
    assert [one[:2], back[:2]] == [[1, 1], [1, 1]]  # q, k and v are one layer
    assert [said[2] for said in (first, one, back)] == [
        greedy(folder, PROMPT, N) for folder in (model_a, one_projection, model_a)
    ]


def test_layers_that_are_not_packed_are_only_copied_from_the_second_time_on(
    steps, model_a, model_b, nudged_once, nudged_twice
):
    versions = ["step_0", "step_1", "other", "step_2"]
    said = run(count_loads, model_b, steps, versions, packs=False)
    assert [one[0] for one in said] == [4 * 4, 0, 0, 0]
    assert [one[2] for one in said] == [
        greedy(folder, PROMPT, N) for folder in (model_a, nudged_once, model_b, nudged_twice)
    ]


def test_a_tied_head_that_is_not_packed_follows_too(tied_steps, tied_a, tied_b):
    said = run(count_loads, tied_a, tied_steps, ["b", "a", "b"], packs=False)
    assert [one[0] for one in said] == [4 * 4, 0, 0]
    assert [one[2] for one in said] == [greedy(folder, PROMPT, N) for folder in (tied_b, tied_a, tied_b)]


def count_loads_of_processed_layers(folder, source, versions):
    """Of layers that are changed, of layers that something is kept of, and of others."""

    def also(layer):
        if layer.prefix.endswith("qkv_proj"):
            layer.weight.data.neg_()
        elif layer.prefix.endswith("o_proj"):
            layer.largest = layer.weight.max()
        elif layer.prefix.endswith("down_proj"):
            weight = layer.weight
            layer.first = lambda: weight[0]

    return count_loads(folder, source, versions, packs=False, also=also)


def test_layers_that_are_processed_otherwise_are_loaded_each_time(steps, model_a):
    said = run(count_loads_of_processed_layers, model_a, steps, ["step_0", "step_1", "other"])
    assert [one[0] for one in said] == [4 * 4, 3 * 4, 3 * 4]


def memory_of_layers(folder, source, versions):
    """Bytes that wait to be used again before each update, and the addresses of a layer that is not packed."""
    llm = open_llm(folder)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    updater, norm = worker.weight_transfer_engine.updater, worker.model_runner.get_model().model.norm
    said = []
    gc.disable()  # a model's worth of memory cannot wait for the collector
    for version in versions:
        updated(llm, version, source)
        updater._finish_freeing(60)
        said.append([updater._buffers.nbytes, norm.weight.data_ptr()])
    return said


def test_layers_are_made_in_the_memory_of_those_before_the_last_commit(steps, model_a):
    said = run(memory_of_layers, model_a, steps, ["step_0", "step_1", "other", "step_0", "other"])
    waiting, places = [one[0] for one in said], [one[1] for one in said]
    assert waiting[0] < waiting[1] == waiting[2] == waiting[3] == waiting[4]
    assert len(set(places)) == 2


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
