"""`python -m weightcast.bench.ipc_files trainer|receiver`: the same bytes through a safetensors file in memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import Model, blank_tensors, digest_of
from weightcast.tensors.flat import Array

_NAME = "model.safetensors"


def as_tensor(array: Array) -> torch.Tensor:
    """A BF16 array as a tensor, without a copy."""
    return torch.from_numpy(array.view("int16")).view(torch.bfloat16)


class Trainer:
    """Saves the file."""

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:  # noqa: ARG002 - has no waits
        """Make the tensors."""
        torch.set_num_threads(1)
        self._path = Path(directory) / _NAME
        self._model = Model(nbytes, seed)
        self._tensors = {name: as_tensor(array) for name, array in self._model.tensors.items()}
        return {}

    def change(self, number: int) -> Message:
        """Make it another version. The file of the last one is gone by now."""
        self._path.unlink(missing_ok=True)
        self._model.change(number)
        return {}

    def move(self) -> Message:
        """Write everything."""
        began_s = time.monotonic()
        save_file(self._tensors, self._path)
        return {"began_s": began_s, "ended_s": time.monotonic()}

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": self._model.digest()}


class Receiver:
    """Reads the file into live tensors."""

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:  # noqa: ARG002 - the same for both
        """Make the tensors."""
        torch.set_num_threads(1)
        self._path = Path(directory) / _NAME
        self._arrays = blank_tensors(nbytes)
        self._tensors = {name: as_tensor(array) for name, array in self._arrays.items()}
        return {}

    def move(self) -> Message:
        """Read everything."""
        began_s = time.monotonic()
        with safe_open(self._path, framework="pt") as file:
            for name, tensor in self._tensors.items():
                tensor.copy_(file.get_tensor(name))
        return {"began_s": began_s, "ended_s": time.monotonic()}

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": digest_of(self._arrays)}


def main() -> None:
    """Answer the bench until it closes the input."""
    if sys.argv[1] == "trainer":
        trainer = Trainer()
        serve({"begin": trainer.begin, "change": trainer.change, "move": trainer.move, "digest": trainer.digest})
    else:
        receiver = Receiver()
        serve({"begin": receiver.begin, "move": receiver.move, "digest": receiver.digest})


if __name__ == "__main__":
    main()
