"""How much memory a stream takes on either side: two buckets, whatever its size. Measured in processes of their own."""

from __future__ import annotations

import json

import pytest

from .ipc_peers import until

MIB = 1 << 20
SIZES = [
    pytest.param(256 * MIB, 8 * MIB, id="256MiB"),
    pytest.param(4096 * MIB, 64 * MIB, id="4GiB", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
]


@pytest.mark.parametrize("end", ["hashing", "inplace"])
@pytest.mark.parametrize(("nbytes", "bucket_nbytes"), SIZES)
def test_a_stream_takes_memory_for_its_buckets_and_not_for_the_model(
    start, memory_dir, end, nbytes, bucket_nbytes, record_property
):
    root = memory_dir / "run"
    trainer = start("ipc_memory", "trainer", root, nbytes, bucket_nbytes)
    until(lambda: (root / "rank-0" / "token").exists() or trainer.poll() is not None, timeout=60)
    receiver = start("ipc_memory", end, root, nbytes, bucket_nbytes)
    report = {}
    for child in (receiver, trainer):
        output, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors[-4000:]
        report |= json.loads(output.splitlines()[-1])
    text = ", ".join(f"{side} {report[side] / MIB:.1f} MiB" for side in ("trainer", "receiver"))
    record_property("memory", text)
    print(text)
    assert report["sent"] == report["taken"] == nbytes
    limit = 4 * bucket_nbytes + 32 * MIB
    assert max(report["trainer"], report["receiver"]) <= limit, text
    assert not list(memory_dir.iterdir())
