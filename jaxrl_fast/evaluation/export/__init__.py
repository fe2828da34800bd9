"""Export the policy of a run, for programs that do not have jaxrl_fast: as StableHLO, as ONNX, or for numpy."""

import json
import shutil
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_fast.options.declare import MAX_INDEX, Bounds, option
from jaxrl_fast.utils import files
from jaxrl_fast.utils.importing import install


@dataclass(frozen=True)
class Options:
    """Policy and format of the export."""

    to: Literal["stablehlo", "onnx", "npz"] = option(
        "stablehlo", "Format: stablehlo is loaded by JAX, onnx by onnxruntime, npz (MLPs only) by numpy."
    )
    out: str = option("", "Folder to create. Default: a new folder export-FORMAT in the run directory.")
    seed: int | None = option(None, "Training seed of the run to export; none: the first.", bounds=Bounds(0, MAX_INDEX))
    member: dict[str, Any] = option(
        {}, "For a run of a sweep with several members: values that select one, such as gamma=0.9."
    )
    which: Literal["best", "last"] = option(
        "best", "Checkpoint: best = highest mean evaluation return over all seeds; last = newest."
    )
    sampled: bool = option(False, "Act as in training instead of greedily; random numbers become an input.")


class Export(NamedTuple):
    """An exported policy, complete in memory, and the folder where it is to be written."""

    folder: Path
    files: dict[str, bytes]
    card: dict[str, Any]  # the content of policy.json
    start: Path = Path()  # the directory that `folder` is relative to; environments may change the current one


def export_run(folder: Path, options: Options, env: Any = None) -> Export:
    """Return the exported policy of the run in `folder`. Nothing has been written yet.

    Args:
        folder: The run's folder.
        options: Select the format, the checkpoint, the seed and the member.
        env: The environment, if it cannot be made from its name in config.yaml.

    Raises:
        ValueError: If the run, the seed or the member does not exist, or the policy does not fit the format.
    """
    out = _check_out(folder, options)
    _check_packages(options.to)
    from jaxrl_fast.evaluation import saved_run
    from jaxrl_fast.utils import devices

    start = files.current_folder()
    settings, env = saved_run.open_env(folder, env)
    saved = saved_run.read_run(folder, options.which, settings, env, options.member, start)
    saved = saved_run.select_seed(saved, saved.seeds[0] if options.seed is None else options.seed)
    export = _build(saved, options, out)
    if not env.on_device:
        devices.release_envs([env])
    return export


def write(export: Export) -> Path:
    """Create the folder with all files in it, or nothing. Return it.

    Raises:
        FileExistsError: If another program has created the folder since the export began.
    """
    folder = export.start / export.folder
    aside = folder.with_name(f"{files.ASIDE}{folder.name}")
    folder.mkdir()
    try:
        aside.mkdir()
        for name, content in export.files.items():
            (aside / name).write_bytes(content)
            files.sync(aside / name)
        aside.rename(folder)  # an empty folder may be replaced
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rmdir()
        raise
    return export.folder


def _check_out(folder: Path, options: Options) -> Path:
    """Return the folder to create. Raise ValueError if that is impossible."""
    if not options.out:
        out = files.new_file(folder / f"export-{options.to}")
        if folder.is_dir():
            files.check_writable(out)
        return out
    out = files.path_of(options.out, "out")
    if out.exists() or out.is_symlink():
        raise ValueError(f"out: must be a new folder, got {out}, which exists; choose another name")
    if not out.parent.is_dir():
        raise ValueError(f"out: must be in an existing folder, got {out}; create {out.parent}")
    files.check_writable(out)
    return out


def _check_packages(to: str) -> None:
    """Raise ValueError if a package that writes this format is not installed."""
    needed = {"stablehlo": ["flatbuffers"], "onnx": ["onnx", "onnxruntime"], "npz": []}[to]
    missing = [name for name in needed if util.find_spec(name) is None]
    if missing:
        command = install("onnx") if to == "onnx" else f"pip install {' '.join(missing)}"
        raise ValueError(f"to {to}: needs {' and '.join(missing)}, got no such package; {command}")


def _build(saved: Any, options: Options, out: Path) -> Export:
    """Return the exported policy, after it has been compared with the run's own."""
    import yaml

    from jaxrl_fast.config import settings
    from jaxrl_fast.evaluation.export import card, check, function
    from jaxrl_fast.training import init_from

    policy = function.make(saved, options.sampled)
    contents, more = _serialize(saved, policy, options.to)
    inputs = function.inputs(policy, options.to == "stablehlo")
    with files.inside(saved.start):
        described = card.describe(saved, policy, options.to, options.sampled, inputs, more)
    described["check"] = check.compare(saved, policy, options.to, contents)
    config = settings.to_mapping(saved.settings) | {"env": saved.env.spec.id}
    if saved.member:
        config |= {"seed": saved.seeds[0], "num_seeds": 1}
    texts = {
        "policy.json": json.dumps(described, indent=2) + "\n",
        "README.md": card.readme(described),
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
    }
    contents |= init_from.weights(saved.agent, saved.learners)
    return Export(out, contents | {name: text.encode() for name, text in texts.items()}, described, saved.start)


def _serialize(saved: Any, policy: Any, to: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of this format, and their description in the card."""
    if to == "stablehlo":
        import jax.export

        from jaxrl_fast.evaluation.export import stablehlo

        about = {
            "platforms": list(stablehlo.PLATFORMS),
            "calling_convention_version": jax.export.maximum_supported_calling_convention_version,
        }
        return {"policy.stablehlo": stablehlo.serialize(policy)}, about
    if to == "onnx":
        from jaxrl_fast.evaluation.export import onnx_model

        about = {"opset": onnx_model.OPSET, "ir_version": onnx_model.IR_VERSION}
        return {"policy.onnx": onnx_model.serialize(policy)}, about
    import io

    import numpy as np

    from jaxrl_fast.evaluation.export import numpy_mlp

    arrays, code = numpy_mlp.write(saved, policy)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}
    return {"policy.npz": buffer.getvalue(), "policy.py": code.encode()}, {"arrays": shapes}
