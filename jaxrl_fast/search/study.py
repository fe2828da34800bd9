"""Draw the values of trials with Optuna, and keep trials in its storage.

The sampler has no state to save: the random numbers of a trial come from the seed of the search and the number of the
trial, and all else that a sampler knows are the trials before it. So a search that is killed and resumed draws the same
values. A trial is added to the storage with all of its values at once.
"""

import contextlib
import json
import math
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from jaxrl_fast.search import spaces
from jaxrl_fast.search.spaces import Dimension
from jaxrl_fast.search.trials import Trial
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.importing import install

JOURNAL = "study.journal"
PRIVATE = "search"  # the name of a study in the journal of its only search
OPTIONS = "options"  # the attribute of a study that holds the options of its searches
HEARTBEAT_S, GRACE_S = 60, 300  # of running trials in a database: between signs of life, and until they count as lost
ATTEMPTS = 5  # to open a database whose tables another process may be creating
NUM_STARTUP = 10  # random trials before TPE


def load_optuna() -> Any:
    """Import Optuna. Raise ValueError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ValueError(f"search: Optuna is not installed; {install('search')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class Study:
    """The trials of a search, or of several that share a storage.

    Args:
        folder: The search directory, where the journal lies unless `storage` is a URL.
        search: The id of the search.
        storage: The URL of an Optuna storage, or "".
        name: The name of the study in a shared storage.
        space: The hyperparameters.
        sampler: tpe, random, cmaes or grid.
        seed: Of the sampler.
        options: What all searches of the study have in common.
        trials: The number of trials, which decides the points of a grid.
        alone: Whether no other search draws trials of the study.
        writes: Whether this process holds the search, and may mend its journal.

    Raises:
        ValueError: If the storage cannot be reached, or if the study has other options.
    """

    def __init__(
        self,
        folder: Path,
        search: str,
        storage: str,
        name: str,
        space: Sequence[Dimension],
        sampler: str,
        seed: int,
        options: Mapping[str, Any],
        trials: int,
        alone: bool,
        writes: bool = True,
    ):
        optuna = self.optuna = load_optuna()
        self.search, self.space, self.seed = search, space, seed
        self.salt = [] if alone else [zlib.crc32(search.encode())]  # searches that share a study differ
        self.distributions = spaces.distributions(space)
        self.make_sampler = _sampler(optuna, sampler, space, trials)
        if not storage and writes:
            _mend(optuna, folder / JOURNAL, alone)
        self.storage = _storage(optuna, storage or folder / JOURNAL)
        try:
            made = optuna.create_study(
                study_name=name or PRIVATE,
                storage=self.storage,
                direction="maximize",
                pruner=optuna.pruners.NopPruner(),
                load_if_exists=True,
            )
        except Exception as error:
            raise ValueError(f"storage: cannot be used ({why(error)}), got {storage or folder / JOURNAL}") from error
        self.study = made
        if not _is_same(made, options):
            made.set_user_attr(OPTIONS, json.loads(json.dumps(options)))

    def count(self) -> int:
        """Return the number of trials so far, of all searches."""
        return len(self.study.get_trials(deepcopy=False))

    def mine(self, round: int) -> list[Any]:
        """Return the trials of a round of this search, as Optuna's FrozenTrials."""
        of_round = {"search": self.search, "round": round}
        return [t for t in self.study.get_trials(deepcopy=False) if of_round.items() <= t.user_attrs.items()]

    def unfinished(self) -> set[str]:
        """Return the ids of the searches that have unfinished trials."""
        return {t.user_attrs["search"] for t in self.study.get_trials(deepcopy=False) if not t.state.is_finished()}

    @contextlib.contextmanager
    def alive(self, round: int) -> Iterator[None]:
        """Give signs of life of the round's trials to a shared database, and mark lost trials of others as failed."""
        if not isinstance(self.storage, self.optuna.storages.RDBStorage):
            yield
            return
        ended, running = threading.Event(), [t._trial_id for t in self.mine(round) if not t.state.is_finished()]

        def beat() -> None:
            while True:
                for number in running:
                    with contextlib.suppress(Exception):  # the next one may reach the database again
                        self.storage.record_heartbeat(number)
                if ended.wait(HEARTBEAT_S):
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            self.optuna.storages.fail_stale_trials(self.study)
            yield
        finally:
            ended.set()
            thread.join()

    def ask(self, round: int, count: int) -> list[Any]:
        """Draw trials until the round has `count`, and add each to the storage. Return all of the round."""
        optuna = self.optuna
        for _ in range(len(self.mine(round)), count):
            before = self.study.get_trials(deepcopy=False)
            sampler = self.make_sampler([self.seed, len(before), *self.salt])
            mirror = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.NopPruner())
            mirror.add_trials(before)
            mirror.ask(self.distributions)
            drawn = mirror.get_trials(deepcopy=False)[-1]
            values = {d.name: spaces.value_of(d, drawn.params[d.name]) for d in self.space}
            attributes = {"search": self.search, "round": round, "values": values}
            self.study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState.RUNNING,
                    params=drawn.params,
                    distributions=self.distributions,
                    user_attrs=json.loads(json.dumps(attributes)),
                    system_attrs=drawn.system_attrs,
                )
            )
            if isinstance(self.storage, optuna.storages.RDBStorage):
                self.storage.record_heartbeat(self.mine(round)[-1]._trial_id)
        return self.mine(round)

    def tell(self, trial: Trial) -> None:
        """Record the result of a trial, unless it has one."""
        state = self.optuna.trial.TrialState
        kept = self.study.get_trials(deepcopy=False)[trial.number]
        if kept.state.is_finished():
            return
        own = ("scores", "steps", "rung", "status", "parent", "env_steps_at_end", "failure")
        about = {name: getattr(trial, name) for name in own} | {"final_values": dict(trial.values)}
        for name, value in about.items():
            self.storage.set_trial_user_attr(kept._trial_id, name, value)
        if trial.status == "failed" or trial.score is None:
            self.study.tell(trial.number, state=state.FAIL)
        elif trial.status == "stopped":
            self.storage.set_trial_intermediate_value(kept._trial_id, trial.steps, trial.score)
            self.study.tell(trial.number, state=state.PRUNED)
        else:
            self.study.tell(trial.number, trial.score)

    def trials(self) -> tuple[Trial, ...]:
        """Return all trials of the study, of all searches."""
        found = []
        for kept in self.study.get_trials(deepcopy=False):
            about = kept.user_attrs
            score = kept.value if kept.value is not None else [*kept.intermediate_values.values(), None][0]
            common = {name: about.get(name, 0) for name in ("steps", "rung", "env_steps_at_end")}
            scores, values = tuple(about.get("scores", ())), about.get("final_values", about.get("values", {}))
            ended = "failed" if kept.state.name == "FAIL" else about.get("status", "running")
            status = ended if kept.state.is_finished() else "running"
            more = {"status": status, "parent": about.get("parent"), "failure": about.get("failure", "")}
            found.append(Trial(kept.number, values, scores, score if status != "running" else None, **common, **more))
        return tuple(found)


def check(
    storage: str, name: str, options: Mapping[str, Any], sampler: str, space: Sequence[Dimension], trials: int
) -> None:
    """Raise ValueError if a shared storage cannot be reached or has a study of other options, or for a bad grid."""
    optuna = load_optuna()
    _sampler(optuna, sampler, space, trials)
    if storage:
        with contextlib.suppress(KeyError):  # a new study
            _is_same(optuna.load_study(study_name=name, storage=_storage(optuna, storage)), options)


def _is_same(study: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a study holds these options, False if it holds none. Raise ValueError if it holds others."""
    found, wanted = study.user_attrs.get(OPTIONS), json.loads(json.dumps(options))
    if found is None:
        return False
    different = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if different:
        problem = f"has other options ({', '.join(different[:3])})"
        raise ValueError(f"study: {problem}, got {study.study_name}; choose another name")
    return True


def _storage(optuna: Any, url: str | Path) -> Any:
    """Return Optuna's storage: of a URL, or of the path of a journal. Raise ValueError if it cannot be reached."""
    if isinstance(url, Path):
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(url)))
    for attempt in range(ATTEMPTS):
        try:
            if url.startswith("redis"):
                return optuna.storages.get_storage(url)
            return optuna.storages.RDBStorage(url, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
        except Exception as error:  # of a database's package
            reason = str(error).partition("\n")[0]
            if attempt + 1 < ATTEMPTS and ("IntegrityError" in reason or "already exists" in reason):
                time.sleep(1)  # another process creates the tables
                continue
            remedy = "use a URL such as sqlite:////shared/study.db"
            raise ValueError(f"storage: cannot be reached ({reason}), got {url}; {remedy}") from None
    raise AssertionError("the last attempt has returned or raised")


def _mend(optuna: Any, path: Path, alone: bool) -> None:
    """Cut the last line of a journal if a process was killed while it wrote it.

    Its lock is removed if this search is alone. Else Optuna does that, 30 seconds after the last write.
    """
    for lock in path.parent.glob(f"{path.name}.lock*") if alone else ():
        lock.unlink()
    if not path.is_file():
        return
    journal = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    journal.acquire()
    try:
        if not (content := path.read_bytes()).endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
    finally:
        journal.release()


def _sampler(optuna: Any, kind: str, space: Sequence[Dimension], trials: int) -> Any:
    """Return a function that makes the sampler of one trial from the numbers of its seed."""
    import numpy as np

    samplers = optuna.samplers
    number = lambda words: int(np.random.SeedSequence([*words]).generate_state(1)[0])
    if kind == "random":
        return lambda words: samplers.RandomSampler(seed=number(words))
    if kind == "grid":
        grid = _grid(space, trials)
        return lambda words: samplers.GridSampler(grid, seed=number(words[:1]))
    if kind == "cmaes" and util.find_spec("cmaes") is None:
        raise ValueError(f"sampler: cmaes needs the package cmaes, which is not installed; {install('search')}")
    if kind == "cmaes":
        return lambda words: samplers.CmaEsSampler(
            seed=number(words), n_startup_trials=NUM_STARTUP, consider_pruned_trials=True
        )
    return lambda words: samplers.TPESampler(seed=number(words), n_startup_trials=NUM_STARTUP)


def _grid(space: Sequence[Dimension], trials: int) -> dict[str, list[Any]]:
    """Return the points of a grid of at most `trials` trials: all choices, and equally many of each range, if any fit.

    The points of a range are evenly spaced on its scale, both ends included.
    """
    ranges = [dimension for dimension in space if dimension.kind != "choice"]
    chosen = math.prod(len(dimension.values) for dimension in space if dimension.kind == "choice")
    count = max(2, int((trials / chosen) ** (1 / max(len(ranges), 1)) + 1e-9))
    found = {}
    for dimension in space:
        ends = [spaces.at(dimension, i / (count - 1)) for i in range(count)]
        values = dimension.values if dimension.kind == "choice" else dict.fromkeys(ends)
        found[dimension.name] = [spaces.drawn_of(dimension, value) for value in values]
    number = math.prod(map(len, found.values()))
    if number != trials:
        raise ValueError(f"trials: a grid of this space has {number} points, got {trials}; use {number}")
    return found
