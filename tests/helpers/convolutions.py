"""Choose how convolutions are computed."""

from jaxrl_fast.kernels import blocks, boards, build, dispatch

WAYS = ("c", "patches", "xla")  # how a convolution is computed: in C, by XLA as a CPU does it, or as a GPU does


def compute_by(way, monkeypatch):
    """Let all layers be computed in one of WAYS from here on."""
    monkeypatch.setenv(build.VARIABLE, "auto" if way == "c" else "xla")
    if way == "xla":
        monkeypatch.setattr(dispatch, "on_cpu", lambda *_: False)
        monkeypatch.setattr(blocks, "block_size", lambda num_rows, max_size: num_rows)
        monkeypatch.setattr(boards, "convolve_columns", boards.convolve_columns_xla)
