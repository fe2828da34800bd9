"""Record episodes of the policy of a run as a GIF or an MP4."""

import base64
import html
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_fast.options.declare import MAX_INDEX, SIZE, Bounds, option
from jaxrl_fast.utils import files
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.importing import install

PAUSE_S = 0.8  # at the end of an episode
NAME = "video.gif"  # in the run's folder


@dataclass(frozen=True)
class Options:
    """Policy and episodes to record."""

    episodes: int = option(1, "Number of episodes.", bounds=Bounds(1, 10**6))
    out: str = option(
        "", "File to write, .gif or .mp4; an existing one is replaced. Default: a new video.gif in the run directory."
    )
    seed: int | None = option(None, "Training seed of the run to show; none: the first.", bounds=Bounds(0, MAX_INDEX))
    member: dict[str, Any] = option(
        {}, "For a run of a sweep with several members: values that select one, such as gamma=0.9."
    )
    play_seed: int = option(0, "Random seed of the episodes.", bounds=Bounds(0, MAX_INDEX))
    which: Literal["best", "last"] = option(
        "best", "Checkpoint: best = highest mean evaluation return over all seeds; last = newest."
    )
    fps: int | None = option(
        None,
        "Frames per second, one for each environment step; none: the environment's rate. A GIF rounds the time of a "
        "frame to hundredths of a second.",
        bounds=Bounds(1, 100),
    )
    max_steps: int = option(3000, "Maximum number of environment steps shown of each episode.", bounds=SIZE)


class Frame(NamedTuple):
    """An image and its duration."""

    image: Any  # uint8 [H, W, 3]
    seconds: float


class Video(NamedTuple):
    """A video file, which a notebook displays, and the episodes in it."""

    path: Path
    returns: list[float]  # of each episode, up to its last frame
    num_frames: int
    num_cut: int  # episodes cut off at `max_steps`

    def _repr_html_(self) -> str:
        """Return the video for a notebook."""
        data = base64.b64encode(self.path.read_bytes()).decode("ascii")
        if self.path.suffix.lower() == ".mp4":
            return f'<video controls loop autoplay muted src="data:video/mp4;base64,{data}"></video>'
        return f'<img alt="{html.escape(self.path.name)}" src="data:image/gif;base64,{data}">'


def open_run(folder: Path, options: Options, env: Any = None) -> tuple[Any, Any, Options]:
    """Return the run's learner with an environment, the renderer, and the options.

    Raises:
        ValueError: If the file cannot be written, or the run, the seed, the member or a renderer does not exist.
    """
    if options.out:
        files.check_out(path_of(options.out, "out"), (".gif", ".mp4"))
    elif folder.is_dir():
        files.check_writable(files.new_file(folder / NAME))
    if options.out.lower().endswith(".mp4") and not has_ffmpeg():
        raise ValueError(f"out {options.out}: MP4 requires imageio-ffmpeg; {install('video')} or use .gif")
    from jaxrl_fast.evaluation import render, saved_run
    from jaxrl_fast.evaluation.render.frames import enlarge

    start = files.current_folder()
    settings, env = saved_run.open_env(folder, env, play_seed=options.play_seed)
    render_env, drawn = env.host and env.host.render, env.view.whole_spec or env.spec
    if render_env is None or render.is_known(drawn.id):
        renderer = render.find(drawn.id, drawn.obs, drawn.frame_stack)
    else:
        env.host.check_render()
        renderer = render.Renderer(lambda obs: enlarge(render_env()), 15)
    saved = saved_run.read_run(folder, options.which, settings, env, options.member, start)
    return saved_run.select_seed(saved, saved.seeds[0] if options.seed is None else options.seed), renderer, options


def has_ffmpeg() -> bool:
    """Return whether MP4 files can be written."""
    return util.find_spec("imageio_ffmpeg") is not None


def record_video(saved: Any, renderer: Any, options: Options) -> Video:
    """Play the episodes and write the video file."""
    from jaxrl_fast.envs.host.env import original_errors
    from jaxrl_fast.utils import compile_cache, devices

    last_moments: list[Any] = []
    fps = options.fps or renderer.fps
    with ExitStack() as stack:
        with files.inside(saved.start):
            path = path_of(options.out) if options.out else stack.enter_context(files.claimed(saved.folder / NAME))
            aside = stack.enter_context(files.atomic_write(path))
        stack.enter_context(compile_cache.compile_cache(saved.settings.options.compile_cache and saved.env.on_device))
        stack.enter_context(original_errors())
        write = write_mp4 if path.suffix.lower() == ".mp4" else write_gif
        num_frames = write(aside, frames(saved, renderer, options, fps, last_moments), fps)
    if not saved.env.on_device:
        devices.release_envs([saved.env])
    num_cut = sum(not moment.over for moment in last_moments)
    return Video(path, [moment.score for moment in last_moments], num_frames, num_cut)


def frames(saved: Any, renderer: Any, options: Options, fps: int, last_moments: list[Any]) -> Iterator[Frame]:
    """Yield a frame for each step of the episodes; append the last moment of each episode to `last_moments`."""
    import jax

    from jaxrl_fast.evaluation.render import canvas
    from jaxrl_fast.training import evaluator

    learner = jax.device_put(saved.learners)
    moments = evaluator.stream_episodes(saved.env, saved.agent, learner, options.play_seed)
    title = f"{saved.env.spec.id.rpartition('/')[2]} · {saved.settings.algo_name}"
    for episode in range(options.episodes):
        for moment in moments:
            is_last = moment.over or moment.length >= options.max_steps
            prefix = f"episode {episode + 1} of {options.episodes}   " if options.episodes > 1 else ""
            caption = f"{prefix}step {moment.length}   return {moment.score:g}"
            image = canvas.add_caption(renderer.draw(moment.obs), caption, title)
            yield Frame(image, PAUSE_S if is_last else 1 / fps)
            if is_last:
                last_moments.append(moment)
                break
        if not moment.over:
            moments = evaluator.stream_episodes(saved.env, saved.agent, learner, options.play_seed + episode + 1)


def write_gif(path: Path, shown: Iterable[Frame], fps: int) -> int:
    """Write the frames as a GIF with a palette per frame. Return their number."""
    from PIL import Image

    durations: list[int] = []

    def images() -> Iterator[Any]:
        """Yield the quantized images and record the duration of each."""
        for image, seconds in shown:
            durations.append(max(round(seconds * 100), 1) * 10)
            yield Image.fromarray(image).quantize(64, dither=Image.Dither.NONE)

    first, *rest = images()
    first.save(path, save_all=True, append_images=rest, duration=durations, loop=0, optimize=False)
    return len(durations)


def write_mp4(path: Path, shown: Iterable[Frame], fps: int) -> int:
    """Write the frames as an MP4; repeat frames of longer duration. Return their number without repetitions."""
    import imageio_ffmpeg
    import numpy as np

    count, writer = 0, None
    for image, seconds in shown:
        image = np.ascontiguousarray(image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2])
        if writer is None:
            size = image.shape[1], image.shape[0]
            writer = imageio_ffmpeg.write_frames(str(path), size, fps=fps, macro_block_size=2)
            writer.send(None)
        for _ in range(max(round(seconds * fps), 1)):
            writer.send(image)
        count += 1
    if writer is not None:
        writer.close()
    return count
