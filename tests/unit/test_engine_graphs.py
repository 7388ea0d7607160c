"""Captured steps say what steps as they are written say, and follow the weights as far as they promise."""

import shutil
import threading

import pytest
import torch
from engine_models import loaded, new_cache, prompts
from engine_sequences import PagedSequences

from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.engines.embedded.ranks.cuda_graphs import CudaGraphs, DecodeBuffers, decode, doubling, is_decode
from weightcast.engines.embedded.ranks.graphs import make_graphs
from weightcast.errors import InvalidInput, UnsupportedModel

NAMES = ("tiny", "moe")


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        init_checkpoint(root / name, name, seed=3)
    init_checkpoint(root / "other", "tiny", seed=4)
    init_draft(root / "mtp", root / "tiny", "mtp", noise=0.05)
    return root


@pytest.fixture
def compiled():
    """Compiled pieces, with the backend that needs no compiler and no time."""
    graphs = make_graphs("compile", max_batch=8, backends=("aot_eager",))
    yield graphs
    graphs.release()


def armed(graphs, *models):
    sequences = PagedSequences(blocks=8)
    graphs.capture([(model, new_cache(model, sequences)) for model in models], new_cache(models[0], sequences))
    return graphs


def said(graphs, model, *, tokens=20, lengths=(1, 9, 30, 300)):
    """Greedy answers to prompts of these lengths that come one by one, so that no two batches have the same shape."""
    sequences, waiting = PagedSequences(blocks=512), list(prompts(*lengths).items())
    cache, turns, answers = new_cache(model, sequences), {}, {}
    while waiting or turns:
        turns |= dict(waiting[:1])
        waiting = waiting[1:]
        batch = sequences.batch(turns)
        chosen = model.logits(graphs.forward(model, batch, cache, cache)[batch.rows]).argmax(-1).tolist()
        for name, token in zip(turns, chosen, strict=True):
            answers.setdefault(name, []).append(token)
        turns = {name: [answers[name][-1]] for name in turns if len(answers[name]) < tokens}
    return answers


def written(model):
    """What a model says that nothing was captured of."""
    return said(make_graphs("off", max_batch=8), model)


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def take_over(model, source):
    """Let a model adopt the memory of another one's weights, as a swap does."""
    for mine, given in zip(model.parameters(), source.parameters(), strict=True):
        mine.data = given.data


def write_over(model, source):
    for mine, given in zip(model.parameters(), source.parameters(), strict=True):
        mine.data.copy_(given.data)


# -- compiled pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_compiled_pieces_say_what_the_model_says_and_no_step_compiles(models_dir, compiled, name):
    model = loaded(models_dir / name)
    wanted = written(model)
    before = compilations()
    armed(compiled, model)
    known = compilations()
    assert known > before
    with torch.compiler.set_stance("fail_on_recompile"):  # raises where no compiled code fits
        assert written(model) == wanted
    assert said(compiled, model) == wanted
    assert compilations() == known


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_says_what_the_model_says(models_dir):
    model, graphs = loaded(models_dir / "tiny"), make_graphs("compile", max_batch=8, backends=("inductor",))
    wanted = written(model)
    armed(graphs, model)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert written(model) == wanted
    assert said(graphs, model) == wanted
    graphs.release()


def test_the_layers_are_the_compiled_ones_only_while_armed(models_dir, compiled):
    model = loaded(models_dir / "tiny")
    calls, norm = [], model.decoder.norm
    armed(compiled, model)
    code = norm.forward
    object.__setattr__(norm, "forward", lambda x: (calls.append(1), code(x))[1])
    said(compiled, model, lengths=(3,), tokens=2)
    assert len(calls) == 2
    compiled.release()
    said(compiled, model, lengths=(3,), tokens=2)
    assert len(calls) == 2


def test_a_main_model_and_its_mtp_head_are_compiled_together(models_dir, compiled):
    main = loaded(models_dir / "tiny")
    head = loaded(models_dir / "mtp", main=main)
    sequences = PagedSequences()
    cache, head_cache = new_cache(main, sequences, hidden=True), new_cache(head, sequences)
    batch = sequences.batch(prompts(5, 1), rows="all")
    wanted = [model(batch, kept, cache) for model, kept in ((main, cache), (head, head_cache))]
    armed(compiled, main, head)
    for model, kept, hidden in zip((main, head), (cache, head_cache), wanted, strict=True):
        torch.testing.assert_close(compiled.forward(model, batch, kept, cache), hidden)


def test_weights_written_in_place_are_followed_without_a_capture(models_dir, compiled):
    model, other = loaded(models_dir / "tiny"), loaded(models_dir / "other")
    armed(compiled, model)
    assert said(compiled, model) != written(other)
    write_over(model, other)
    assert said(compiled, model) == written(other)
    assert compiled.captures == 1


@pytest.mark.parametrize("kind", ["off", "compile"])
def test_weights_that_moved_are_followed_after_a_capture(models_dir, compiled, kind):
    graphs = compiled if kind == "compile" else make_graphs("off", max_batch=8)
    model, other = loaded(models_dir / "tiny"), loaded(models_dir / "other")
    armed(graphs, model)
    before = compilations()
    take_over(model, other)
    armed(graphs, model)
    assert compilations() == before  # the addresses are new, the code is not
    assert said(graphs, model) == written(other)
    assert (graphs.kind, graphs.captures, graphs.armed) == (kind, 2, True)


def test_weights_that_moved_to_another_layout_are_compiled_for(models_dir, compiled):
    model = loaded(models_dir / "tiny")
    wanted = written(model)
    armed(compiled, model)
    before = compilations()
    weight = model.decoder.layers[0].mlp.gate_up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    armed(compiled, model)
    assert compilations() > before
    with torch.compiler.set_stance("fail_on_recompile"):
        assert written(model) == wanted


def test_released_pieces_run_as_written_and_can_be_captured_again(models_dir, compiled):
    model = loaded(models_dir / "tiny")
    wanted = written(model)
    compiled.release()
    assert said(compiled, model) == wanted
    for turn in (1, 2):
        known = compilations()
        armed(compiled, model)
        assert compilations() > known  # a release drops what was compiled
        assert (compiled.armed, compiled.captures) == (True, turn)
        compiled.release()
        compiled.release()
        assert not compiled.armed
        known = compilations()
        assert said(compiled, model) == wanted
        assert compilations() == known


def test_captured_weights_can_be_freed(models_dir, compiled):
    from torch.multiprocessing.reductions import StorageWeakRef

    model = loaded(models_dir / "tiny")
    armed(compiled, model)
    said(compiled, model)
    compiled.release()
    memory = [StorageWeakRef(weight.untyped_storage()) for weight in model.parameters()]
    for weight in model.parameters():
        weight.data = torch.empty(0)
    assert all(one.expired() for one in memory)


def test_the_next_backend_is_tried_where_one_fails(models_dir, caplog):
    model, graphs = loaded(models_dir / "tiny"), make_graphs("compile", max_batch=8, backends=("no such", "aot_eager"))
    armed(graphs, model)
    assert graphs.backend == "aot_eager"
    assert 'compile failed  backend="no such"' in caplog.text
    assert said(graphs, model) == written(model)
    graphs.release()


def test_a_model_that_no_backend_compiles_is_refused_and_still_runs(models_dir):
    model, graphs = loaded(models_dir / "tiny"), make_graphs("compile", max_batch=8, backends=("no such", "nor this"))
    with pytest.raises(UnsupportedModel, match="--graphs off") as caught:
        armed(graphs, model)
    assert "no such: " in str(caught.value)
    assert "nor this: " in str(caught.value)
    assert (graphs.armed, graphs.captures) == (False, 0)
    assert said(graphs, model) == written(model)


def test_compiling_leaves_no_thread_of_ours_behind(models_dir, compiled):
    before = set(threading.enumerate())
    armed(compiled, loaded(models_dir / "tiny"))
    assert {thread.name for thread in threading.enumerate() if thread not in before} <= {"tqdm_monitor"}


# -- CUDA graphs: what can be seen of them on a CPU -------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("size", "length"), [(3, 32), (4, 40), (8, 333)])
@torch.inference_mode()
def test_a_decode_step_over_fixed_buffers_does_what_the_model_does(models_dir, hidden, block_size, size, length):
    model, given = loaded(models_dir / "tiny"), prompts(1, 9, 30)
    sequences = PagedSequences(blocks=400, block_size=block_size)
    caches = [new_cache(model, sequences, hidden=hidden) for _ in range(2)]
    for cache in caches:
        for layer in cache.layers:
            layer.fill_(float("nan"))  # what others left
    buffers = DecodeBuffers(model, caches[1], sequences=8, length=400)
    buffers.tables.fill_(7)
    turns = given
    for step in range(3):
        batch = sequences.batch(turns)
        wanted = model(batch, caches[0])
        if step:
            assert is_decode(batch)
            buffers.fill(batch, size)
            decode(model, caches[1], buffers, size=size, length=length)
            torch.testing.assert_close(buffers.hidden[:3], wanted, atol=1e-5, rtol=1e-5)
        else:
            model(batch, caches[1])
        turns = {name: [step] for name in given}
    kept = torch.cat([sequences.all_slots(name) for name in given])
    for mine, its in zip((*caches[1].layers, caches[1].hidden), (*caches[0].layers, caches[0].hidden), strict=True):
        if its is not None:
            torch.testing.assert_close(mine[kept], its[kept], atol=1e-5, rtol=1e-5)
            others = torch.ones(len(its), dtype=torch.bool).index_fill_(0, kept, 0)
            assert torch.equal(mine[others].isnan(), its[others].isnan())  # and nothing else was written
    assert "forward" not in vars(model.decoder.layers[0].attention)


class EagerRecorder:
    """Stands in for the GPU: a recorded step is run again when it is replayed."""

    replayed = 0

    def __init__(self, device):
        assert device.type == "cpu"

    def record(self, warm_up, step):
        warm_up()
        return EagerRecording(step)


class EagerRecording:
    def __init__(self, step):
        self._step = step

    def replay(self):
        EagerRecorder.replayed += 1
        self._step()

    def reset(self):
        self._step = None


@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_are_replayed_and_others_are_not(models_dir, monkeypatch, name):
    monkeypatch.setattr(EagerRecorder, "replayed", 0)
    model, graphs = loaded(models_dir / name), CudaGraphs(3, EagerRecorder)
    sequences = PagedSequences(blocks=512)
    cache = new_cache(model, sequences)
    for layer in cache.layers:
        layer.fill_(1)
    graphs.capture([(model, cache)], cache)
    assert all(bool((layer == 1).all()) for layer in cache.layers)  # a capture leaves what is cached
    plain, steps = new_cache(model, sequences), []
    for turns in (
        prompts(5, 300, 1, 9),
        *({f"s{one}": [7] for one in some} for some in ([1], [0, 2, 3], [0, 1], [0, 1, 2, 3])),
    ):
        batch = sequences.batch(turns)
        before = EagerRecorder.replayed
        found, wanted = graphs.forward(model, batch, cache, cache), model(batch, plain)
        steps.append(EagerRecorder.replayed - before)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert steps == ([0, 1, 1, 1, 0] if name == "tiny" else [0] * 5)
    assert (graphs.captures, graphs.armed) == (1, True)
    other = new_cache(model, sequences)
    graphs.forward(model, sequences.batch({"new": [1]}), other, other)  # a cache whose addresses were not captured
    graphs.release()
    graphs.forward(model, sequences.batch({"new": [1]}), cache, cache)
    assert EagerRecorder.replayed == sum(steps)
    assert not graphs.armed


def test_only_steps_of_one_token_each_are_decode_steps():
    sequences = PagedSequences()
    assert not is_decode(sequences.batch({"a": [1, 2], "b": [3]}))
    assert is_decode(sequences.batch({"a": [1], "b": [3]}))
    assert not is_decode(sequences.batch({"a": [1], "b": [3]}, replay=torch.zeros((2, 1, 1))))


@pytest.mark.parametrize(
    ("first", "last", "wanted"), [(1, 1, (1,)), (1, 8, (1, 2, 4, 8)), (1, 6, (1, 2, 4, 6)), (256, 100, (100,))]
)
def test_sizes_double_up_to_the_largest(first, last, wanted):
    assert doubling(first, last) == wanted


def test_cuda_graphs_of_a_model_on_the_cpu_are_refused_and_it_still_runs(models_dir):
    model, graphs = loaded(models_dir / "tiny"), make_graphs("cuda", max_batch=8)
    with pytest.raises(UnsupportedModel, match="on cpu"):
        armed(graphs, model)
    graphs.release()
    assert (graphs.kind, graphs.captures, graphs.armed) == ("cuda", 0, False)
    assert said(graphs, model) == written(model)


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="off, compile or cuda"):
        make_graphs("metal", max_batch=1)
    with pytest.raises(InvalidInput, match="nothing to compile with"):
        make_graphs("compile", max_batch=1, backends=())
