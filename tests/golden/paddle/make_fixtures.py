"""Write the .pdparams files beside this script. They were made with paddlepaddle 3.3.1; run it with a Python that has it.

lin.pdparams is a freshly initialised layer: its values are whatever Paddle's generator gave.
"""

from pathlib import Path

import paddle

HERE = Path(__file__).parent


def main() -> None:
    paddle.seed(0)
    state = {
        "w": paddle.arange(12, dtype="float32").reshape([3, 4]),
        "b": paddle.arange(6, dtype="float32").astype("bfloat16"),
        "h": paddle.arange(6, dtype="float32").astype("float16"),
        "i": paddle.arange(5, dtype="int64"),
        "s": paddle.to_tensor(3.5),
    }
    for protocol in (2, 4):
        paddle.save(state, str(HERE / f"sd_p{protocol}.pdparams"), protocol=protocol)
    paddle.save(state, str(HERE / "sd_st.pdparams"), safetensors=True)
    paddle.save(paddle.nn.Linear(2, 3).state_dict(), str(HERE / "lin.pdparams"))
    paddle.save({"a": {"n": state["w"]}, "k": [state["b"]]}, str(HERE / "nested.pdparams"))


if __name__ == "__main__":
    main()
