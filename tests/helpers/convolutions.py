"""Select the implementation of convolutions."""

from jaxrl_fast.kernels import blocks, boards, build, dispatch

WAYS = ("c", "patches", "xla")  # in C, by XLA in the form for a CPU, or by XLA in the form for a GPU


def compute_by(way, monkeypatch):
    """Compute all layers in one of WAYS from now on."""
    monkeypatch.setenv(build.VARIABLE, "auto" if way == "c" else "xla")
    if way == "xla":
        monkeypatch.setattr(dispatch, "on_cpu", lambda *_: False)
        monkeypatch.setattr(blocks, "block_size", lambda num_rows, max_size: num_rows)
        monkeypatch.setattr(boards, "convolve_columns", boards.convolve_columns_xla)
