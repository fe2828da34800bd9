"""Settings of a run from a command line, a preset file or Python keywords, through one door and with one set of names.

All three are read as pairs of an option's name and a value ("num_envs", "agent.learning_rate"; `written`), later ones
over earlier ones, and converted (`values`) by the types of the dataclasses (`options`). Whatever is wrong is a
`ValueError` of one sentence. Neither jax nor numpy is imported, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import operator
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from jaxrl_fast import agents
from jaxrl_fast.agents.configs import CONFIGS, NEEDS
from jaxrl_fast.manual import print_help
from jaxrl_fast.naming import SWEEP, known_options, refuse_name, speller, without_no
from jaxrl_fast.options import DEFAULT, LAST_SEED, SINGLE, Options, Task, types_of
from jaxrl_fast.spelling import nearest, shown
from jaxrl_fast.values import added, check_range, convert, is_whole
from jaxrl_fast.written import CONFIG, Setting, from_mapping, listed, made, one, path_of, read_preset, shipped, tokenise

RUNS = Path("runs")  # where they are kept unless told
LAYOUT = "sweep.yaml"  # of a sweep: its groups and their members
DECIDE_GAMES = ("exact_resume", "save_every", "eval_every", "eval_episodes", "eval_envs")  # where games begin anew
NOT_OF_GAMES = ("num_threads", "thread_affinity_offset")  # options of environments that only say how they are stepped


class UnknownAlgorithm(ValueError):
    """There is none of that name, or it cannot be imported from here."""


class Settings(NamedTuple):
    """One run, resolved."""

    algo: str
    preset: str  # the preset's name or file, "" where there is none
    options: Options
    agent: Any  # the algorithm's dataclass
    by_default: bool = False  # nothing said what to train

    @property
    def algo_name(self) -> str:
        """The algorithm's name without the package that one of one's own is in: for folders and titles."""
        return self.algo.rpartition(".")[2]


def from_command_line(argv: Sequence[str]) -> Settings:
    """Settings from a command line. Prints the help and exits where it is asked for."""
    positional, written = tokenise(argv)
    if len(positional) > 1:
        too_many = f"{positional[1]!r} is one word too many: only an algorithm stands without an option's name"
        raise ValueError(f"{too_many}, and an environment is --env NAME")
    asks_help = any(s.name in ("help", "h") for s in written)
    written = [s for s in written if s.name not in ("help", "h")]
    settings = resolve(positional[0] if positional else "", written)
    refuse_idle(written, [settings.agent])
    if asks_help:
        print_help(settings.algo, settings.options, settings.agent)
        raise SystemExit(0)
    return settings


def from_keywords(
    preset: str | None = None, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> Settings:
    """Settings from Python: the options' names as keywords, the algorithm's own in `agent`."""
    algo = name_of(algo)
    given = ({} if preset is None else {"config": preset}) | options | ({"agent": agent} if agent else {})
    if not given.get("resume", True):  # as by default
        del given["resume"]
    written = from_mapping(given, lambda name: name)
    settings = resolve(algo, written)
    refuse_idle(written, [settings.agent])
    return settings


def name_of(algo: str | ModuleType) -> str:
    """An algorithm's, by which other processes find it."""
    if not isinstance(algo, ModuleType):
        return algo
    if algo.__name__ == "__main__":
        raise ValueError(
            "algo: the script that runs is no module that others can import; put it into a file of its own"
        )
    if algo.__name__ in CONFIGS:
        raise ValueError(f"algo: the module {algo.__name__} has the name of an algorithm of ours; give it another")
    return algo.__name__.removeprefix(f"{agents.__name__}.")


def resolve(algo: str, written: list[Setting]) -> Settings:
    """Presets first, what was written over them, defaults below."""
    resume = next((s for s in reversed(written) if s.name == "resume"), None)
    if resume is not None:
        folder = path_of(folder_of(resume, "a run's folder"), "--resume")
        return resumed(algo, [s for s in written if s.name != "resume"], folder)
    by_default = is_nothing_said(algo, written)
    if by_default:
        written = from_mapping(DEFAULT, lambda name: name) + written
    preset = preset_of(written)
    if preset in CONFIGS:
        raise ValueError(f"{preset!r} is an algorithm and no preset: `train {preset}`, or algo={preset!r} from Python")
    from_preset = [] if preset is None else read_preset(preset)
    of_preset = next((one(s, "an algorithm") for s in from_preset if s.name == "algo"), "")
    if algo and of_preset and algo != of_preset:
        run = next((s for s in written if s.name == "config" and s.said == "--resume"), None)
        what = f"--resume {Path(run.values[0]).parent} is a run of" if run else f"preset {preset} is for"
        raise ValueError(f"{what} {of_preset}, not {algo}")
    algo = str(algo or of_preset or "ppo")
    if algo.endswith(".py") or not agents.exists(algo):
        _refuse_algorithm(algo, of_preset and f" of {preset}: no module of that name is found from here")
    settings = [s for s in from_preset if s.name != "algo"] + [s for s in written if s.name != "config"]
    try:
        agent_type = agents.options(algo)
    except ValueError as error:
        raise UnknownAlgorithm(str(error)) from error
    values: dict[str, Any] = {}
    known = known_options(agent_type)
    for setting in (without_no(s, known) for s in settings):
        if setting.name not in known:
            refuse_name(setting, known, algo)
        value = _convert(known[setting.name], setting)
        if setting.name == "env_options":
            _check_env_options(setting, value)
        check_range(setting, value)
        values[setting.name] = added(known[setting.name], values.get(setting.name), value)
    if not any(s.said == "--resume" for s in written):
        _forget_threshold(values, from_preset, written)
    for place, other in (("run_dir", "name"), ("name", "run_dir")):  # a preset's is overridden by either
        if any(s.name == place for s in written) and not any(s.name == other for s in written):
            values.pop(other, None)
    own = {name[6:]: value for name, value in values.items() if name.startswith("agent.")}
    options = Options(**{name: value for name, value in values.items() if not name.startswith("agent.")})
    last_seed = options.seed + options.num_seeds - 1
    if last_seed > LAST_SEED:
        raise ValueError(f"seeds {options.seed} to {last_seed} pass {LAST_SEED}, the last one there is")
    if options.stop_when_solved and options.solved is None:
        raise ValueError("--stop-when-solved needs to know what solved means: give --solved RETURN")
    return Settings(algo, preset or "", options, agent_type(**own), by_default)


def _refuse_algorithm(algo: str, of_preset: str) -> NoReturn:
    hint = nearest(algo, CONFIGS) or nearest(algo, shipped(), "--config {}".format)
    if (path_of(algo) / CONFIG).is_file():
        hint = f"; to go on with the run in that folder, --resume {algo}"
    elif algo.endswith(".py"):
        hint = f"; of one's own it is a module's name, as one imports it, such as {Path(algo).stem}"
    raise UnknownAlgorithm(f"unknown algorithm {algo!r}{of_preset}{hint or f'; there are {listed(CONFIGS)}'}")


def _convert(kind: Any, setting: Setting) -> Any:
    """The value. Several of them, as a sweep takes them, are for a sweep."""
    try:
        return convert(kind, setting)
    except ValueError:
        text = setting.values[0] if len(setting.values) == 1 else None
        one_wanted = setting.name not in SINGLE and typing.get_origin(kind) not in (tuple, dict)
        one_wanted &= setting.said.startswith("--")
        if isinstance(text, str) and one_wanted and ("," in text or ".." in text and is_whole(kind)):
            raise ValueError(f"{setting.said} takes one value, not {text}; {SWEEP} takes several") from None
        raise


def folder_of(setting: Setting, wanted: str) -> str:
    """The folder that was given. ValueError for none, as of a shell's variable that is not set."""
    folder = convert(str, setting)
    if not folder:
        raise ValueError(f"{setting.said} wants {wanted}, and '' is none")
    return folder


def preset_of(written: Sequence[Setting]) -> str | None:
    """The preset's name or file, None where there is none."""
    last = next((s for s in reversed(written) if s.name == "config"), None)
    return None if last is None else convert(str, last._replace(values=[one(last, "a preset's name or file")]))


def refuse_idle(written: Sequence[Setting], agents: Sequence[Any]) -> None:
    """ValueError where what was written does nothing, for none of these agents has the switch on that it needs.

    A preset's options are let pass where it has a word on the switch as well, which may have been turned off since.
    """
    preset = preset_of(written)
    from_preset = [] if preset is None else read_preset(preset)
    known = {s.name for s in from_preset}
    mine = [s for s in from_preset if f"agent.{_needed(s)[0]}" not in known]
    for setting in [*mine, *written]:
        switch, values = _needed(setting)
        if switch and all(getattr(agent, switch, values[0]) not in values for agent in agents):
            way = "" if values == (True,) else f" {' or '.join(values)}"
            raise ValueError(f"{setting.said} does nothing without {speller(setting)(f'agent.{switch}')}{way}")


def _needed(setting: Setting) -> tuple[str, tuple[Any, ...]]:
    """The switch without which an option of the algorithm does nothing, and what it is to be; "" for none."""
    return NEEDS.get(setting.name.removeprefix("agent."), ("", ()))


def _forget_threshold(values: dict[str, Any], from_preset: list[Setting], written: list[Setting]) -> None:
    """What a preset calls solved, it says of its own environment."""
    env = next((one(s, "an environment") for s in from_preset if s.name == "env"), None)
    same = isinstance(values.get("env"), str) and _same_env(env, values["env"])
    if env is not None and not same and not any(s.name == "solved" for s in written):
        values.pop("solved", None)


def is_nothing_said(algo: str, written: list[Setting]) -> bool:
    """Whether nothing says what to train."""
    return not algo and not any(s.name in ("config", "env") for s in written)


def resumed(algo: str, written: list[Setting], folder: Path) -> Settings:
    """Settings of the run in this folder, with what was written over them where that may change."""
    if (folder / LAYOUT).is_file():
        raise ValueError(f"--resume {folder} is a sweep and no run; go on with {SWEEP} --resume {quote(str(folder))}")
    path = file_of_run(folder, f"--resume {folder}")
    for setting in written:
        if setting.name in ("config", "run_dir", "name"):
            raise ValueError(f"{setting.said} does not go with --resume, which goes on in the run's own folder")
    if "members" in made(path):
        whole = f"{SWEEP} --resume {quote(str(folder.parent))}"
        raise ValueError(f"--resume {folder} is a part of a sweep; go on with {whole}")
    as_preset = Setting("config", [str(path)], "--resume")
    before, now = resolve(algo, [as_preset]), resolve(algo, [as_preset, *written])
    known = known_options(type(now.agent))
    for setting in (without_no(s, known) for s in written):
        place, name = ("agent", setting.name[6:]) if setting.name.startswith("agent.") else ("options", setting.name)
        old, new = (getattr(getattr(which, place), name) for which in (before, now))
        fixed = place == "agent" or name in types_of(Task) and name != "total_steps"
        fixed |= before.options.exact_resume and name in DECIDE_GAMES
        same = SAME.get(name, operator.eq)(old, new)
        if fixed and not same:
            raise ValueError(f"{setting.said} {plain(new)}: this run has {plain(old)}, and goes on only with that")
    check_env(folder, now.options.env)
    return now._replace(preset="", options=dataclasses.replace(now.options, resume=str(folder)))


def of_run(folder: Path) -> Settings:
    """Settings of the run in this folder, as it wrote them down."""
    path = file_of_run(folder, str(folder))
    return resolve("", [Setting("config", [str(path)], str(path))])


def check_env(folder: Path, env: Any) -> None:
    """ValueError where a run was trained in an object, which its name would make anew in another way."""
    if isinstance(env, str) and made(folder / CONFIG).get("env_is_an_object"):
        raise ValueError(
            f"{folder} was trained in an object of {env}, which may have been made in a way of its own; give that, or "
            "the class, from Python: env=..."
        )


def file_of_run(folder: Path, said: str) -> Path:
    """Where the run in this folder wrote its settings down."""
    path = folder / CONFIG
    if (folder / LAYOUT).is_file():
        runs = sorted(str(below.parent) for below in folder.glob(f"*/{CONFIG}"))
        there = f"one of its runs is {runs[0]}" if runs else "none of its runs has begun"
        raise ValueError(f"{said} is a sweep and no run; {there}")
    if not path.is_file():
        below = sorted((p.parent for p in folder.glob(f"*/{CONFIG}")), key=lambda run: run.stat().st_mtime)
        newest = f"; the newest in a folder of it is {below[-1]}" if below else ""
        by_name = f"; did you mean {RUNS / folder.name}?" if (RUNS / folder.name / CONFIG).is_file() else ""
        hint = newest or by_name or nearest_with(CONFIG, folder)
        raise ValueError(f"{shown(said)}: there is no run in it (no {CONFIG}){hint}")
    return path


def nearest_with(file: str, folder: Path) -> str:
    """For a message about a folder that has no such file: the nearest names beside it of folders that have."""
    siblings = [f.name for f in folder.parent.iterdir() if (f / file).is_file()] if folder.parent.is_dir() else []
    return nearest(folder.name, siblings, lambda name: str(folder.with_name(name)))


def to_mapping(settings: Settings) -> dict[str, Any]:
    """Plain values for YAML, which `read_preset` reads back. What belongs to one run only is left out."""
    options = {f: getattr(settings.options, f) for f in types_of(Options) if f not in ("run_dir", "name", "resume")}
    if not isinstance(options["env"], str):
        options["env"] = re.sub(r" at 0x[0-9a-f]+", "", repr(options["env"]))  # another process has it elsewhere
    options["env_options"] = {name: as_lists(value) for name, value in options["env_options"].items()}
    agent = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(settings.agent).items()}
    return {"algo": settings.algo, **options, "agent": agent}


def as_lists(value: Any) -> Any:
    """Arrays as lists of numbers, also within lists and dictionaries, and what is none as it is."""
    if isinstance(value, (list, tuple)):
        return [as_lists(part) for part in value]
    if isinstance(value, dict):
        return {name: as_lists(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _check_env_options(setting: Setting, options: Mapping[str, Any]) -> None:
    """What goes on with a run or plays with what it has learnt has them from a file: ValueError for what none holds."""
    for name, value in options.items():
        if not _fits_a_file(as_lists(value)):
            raise ValueError(
                f"{setting.said}: {name} is of type {type(value).__name__}, and only numbers, words and lists of them "
                f"can be written down for later; make the environment with it: env=MyEnv({name}=...)"
            )


def _fits_a_file(value: Any) -> bool:
    """YAML and JSON both have it."""
    words = (str, int, float, bool, type(None))
    if type(value) is dict:
        return all(type(name) in words and _fits_a_file(part) for name, part in value.items())
    return all(map(_fits_a_file, value)) if type(value) in (list, tuple) else type(value) in words


def _same_env(old: Any, new: Any) -> bool:
    """With or without its backend; what is no id has no name that could be compared."""
    if not isinstance(new, str):
        return True
    (backend, name), (other, its_name) = (env.rpartition("/")[::2] for env in (str(old), new))
    return name == its_name and (backend == other or not backend or not other)


def _same_games(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Options of environments that play the same."""
    of_games = lambda options: {name: as_lists(value) for name, value in options.items() if name not in NOT_OF_GAMES}
    return of_games(old) == of_games(new)


SAME = {"env": _same_env, "env_options": _same_games}  # how values are compared that a run cannot change; others by ==


def plain(value: Any) -> str:
    """A value as it is written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)
