"""Searches whose tasks are Slurm jobs or Ray tasks: how they share a study, end, resume, and mistakes."""

import csv
import math
import threading
import time
from types import SimpleNamespace

import pytest

import jaxrl_fast
from jaxrl_fast.search import __main__, prepare, request, rounds, study, tasks, work
from jaxrl_fast.sweep import slurm
from jaxrl_fast.sweep.directory import FAILED
from jaxrl_fast.utils import locks
from tests.helpers.ray_clusters import local_ray

TINY = "--config ppo_cartpole --over learning-rate=1e-4..1e-2 --num-envs 4 --total-steps 320 --rollout-length 20 "
TINY += "--num-minibatches 2 --num-epochs 1 --network.hidden-sizes 8 --eval-episodes 4 --eval-envs 4 --log-level quiet "
TINY += "--seeds 1 --test-seeds 1 --winners 1 "


@pytest.fixture(scope="module")
def ray():
    yield from local_ray()


@pytest.fixture
def no_slurm(monkeypatch):
    """Accept the options of Slurm on a machine without it."""
    monkeypatch.setattr(slurm, "check", lambda options: None)


def prepared(line, folder=None):
    where = f"--search-dir {folder}" if folder else ""
    return prepare.prepare(request.from_command_line(f"{TINY} {line} {where}".split()))


def rows(folder):
    with (folder / "trials.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def peak(rate):
    """Return the score of a learning rate in pretended trainings; the best rate is 1e-3."""
    return 100 - 50 * abs(math.log10(rate) + 3)


class Pretence:
    """Scores trials by `peak` instead of training them, and stops like a killed process where `fails` says so."""

    def __init__(self, monkeypatch):
        self.trained, self.fails = [], lambda folder: False
        monkeypatch.setattr(rounds, "run", self)

    def __call__(self, round, folder, *_):
        if self.fails(folder):
            raise rounds.Stopped(137)
        rates = [values["learning_rate"] for values in round.values]
        self.trained += [(folder.parent.name, rate) for rate in rates]
        scores, n = [(peak(rate),) * len(round.seeds) for rate in rates], len(rates)
        return rounds.Result(scores, [320] * n, [0] * n, [*round.values], [None] * n, {}, [])


@pytest.fixture
def pretence(monkeypatch):
    return Pretence(monkeypatch)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--trials 64 --sampler random", 16),  # 64 / 4 tasks
        ("--trials 64", 4),  # a quarter of 64 / 4 tasks
        ("--trials 64 --scheduler halving", 9),  # 3^2, so that one trial reaches the third rung
        ("--trials 64 --batch 5", 5),
    ],
)
def test_tasks_divide_rounds_and_have_own_folders_and_draws(line, expected, tmp_path, no_slurm):
    search = prepared(f"{line} --launcher slurm --workers 4 --total-steps 8k", tmp_path / "one")
    found = search.tasks
    assert [task.folder for task in found.values()] == [tmp_path / "one" / "workers" / name for name in "0123"]
    assert {task.batch for task in found.values()} == {expected} and len({task.id for task in found.values()}) == 4
    assert prepare.read(tmp_path / "one").tasks.keys() == found.keys(), "jobs read the same"


def test_last_job_to_end_tests_winners_and_killed_job_resumes_its_trials(tmp_path, no_slurm, pretence, monkeypatch):
    """Job 0 is killed in its first round, and job 1 trains the other trials. A new command submits job 0 only."""
    submitted = []
    monkeypatch.setattr(slurm, "submit", lambda folder, names, *_: submitted.append(names) or names)
    folder = tmp_path / "one"
    line = f"{TINY} --trials 12 --sampler random --batch 3 --launcher slurm --workers 2 --search-dir {folder}"
    assert __main__.main(line.split()) == 0
    pretence.fails = lambda programs: programs.parent.name == "0"
    assert tasks.train_as_job(str(folder), "0") == ("stopped", 9)
    assert tasks.train_as_job(str(folder), "1") == ("its trials are done; left are the tasks 0", None)
    assert not (folder / "trials.csv").exists() and len(pretence.trained) == 9
    assert __main__.main(["--resume", str(folder), "--launcher", "slurm"]) == 0
    assert submitted == [["0", "1"], ["0"]]
    pretence.fails = lambda programs: False
    assert tasks.train_as_job(str(folder), "0") == ("the search is done", None)
    rates = [float(row["learning_rate"]) for row in rows(folder)]
    assert [float(row["score"]) for row in rows(folder)] == pytest.approx([peak(rate) for rate in rates])
    of_trials = [(where, rate) for where, rate in pretence.trained if where != "one"]
    assert sorted(rate for _, rate in of_trials) == pytest.approx(sorted(rates), rel=1e-5), "each is trained once"
    assert [where for where, _ in of_trials] == ["1"] * 9 + ["0"] * 3
    assert [where for where, _ in pretence.trained[12:]] == ["one"] * 2, "the winner and the default settings"
    preset = (folder / "best.yaml").read_text()
    assert f"learning_rate: {max(rates, key=peak):.4g}"[:-1] in preset and (folder / "report.md").is_file()


def test_single_job_draws_what_a_search_without_launcher_draws(tmp_path, no_slurm, pretence):
    for name, words in (("job", "--launcher slurm"), ("here", "")):
        prepared(f"--trials 12 --batch 4 {words}", tmp_path / name).lock.release()
    assert tasks.train_as_job(str(tmp_path / "job"), "0") == ("the search is done", None)
    assert __main__.main(["--resume", str(tmp_path / "here"), "--log-level", "quiet"]) == 0
    assert rows(tmp_path / "job") == rows(tmp_path / "here") and len(rows(tmp_path / "job")) == 12


@pytest.mark.parametrize("shared", [False, True], ids=["journal", "database"])
def test_tasks_that_are_left_run_here_without_launcher_and_can_be_extended(shared, tmp_path, no_slurm, pretence):
    where = f"--storage sqlite:///{tmp_path}/study.db --study one" if shared else ""
    line = f"--trials 6 --sampler random --launcher slurm --workers 3 {where}"
    search = prepared(line, tmp_path / "one")
    search.lock.release()
    assert __main__.main(["--resume", str(tmp_path / "one"), "--log-level", "quiet"]) == 0
    assert len(rows(tmp_path / "one")) == 6 and len(pretence.trained) == 6 + 2
    found = jaxrl_fast.search(resume=tmp_path / "one", trials=9, log_level="quiet")
    assert len(found.trials) == 9 and len({trial.values["learning_rate"] for trial in found.trials}) == 9


def test_second_process_leaves_a_task_that_another_one_runs(tmp_path, no_slurm, pretence, capsys):
    folder = tmp_path / "one"
    prepared("--trials 2 --launcher slurm --workers 2", folder).lock.release()
    (folder / "workers" / "0").mkdir(parents=True)
    lock = locks.Lock(folder / "workers" / "0")
    assert tasks.train_as_ray_task(str(folder), "0") is None
    says = f"another process trains {folder}/workers/0; wait for its end"
    assert tasks.train_as_job(str(folder), "0") == (f"stopped; {says}", None)
    assert __main__.main(["--resume", str(folder), "--log-level", "quiet"]) == 1
    assert capsys.readouterr().err == f"warning: {says}\n" and not pretence.trained
    lock.release()


def test_shared_journal_is_mended_only_while_no_other_process_writes(tmp_path):
    """A process holds Optuna's lock and has written half a line, whose rest follows later."""
    optuna, path = study.load_optuna(), tmp_path / study.JOURNAL
    path.write_bytes(b'{"a":1}\n{"b"')
    lock = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    lock.acquire()
    threads = [threading.Thread(target=study._mend, args=(optuna, path, False)) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    with path.open("ab") as file:
        file.write(b':2}\n{"c"')  # the process ends here
    lock.release()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n' and [*tmp_path.iterdir()] == [path]


MISTAKES = [
    ("--workers 2", "error: workers: several need launcher slurm or ray, got 2; add one, or "),
    ("--slurm-option timeout_min=3", "error: slurm_options: needs launcher slurm\n"),
    ("--ray-option num_cpus=1", "error: ray_options: needs launcher ray\n"),
    ("--launcher slurm --slurm-option nodes=2", "error: slurm_options: a job of a search has one task, got 2; use "),
    ("--launcher slurm --workers 2 --scheduler pbt", "error: workers: a population of pbt is trained in one task"),
    ("--launcher slurm --workers 2 --sampler grid", "error: workers: tasks that draw at the same time would miss"),
    ("--launcher slurm --workers 0", "error: workers: must be at least 1 and "),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES)
def test_mistake_is_one_line(words, says, tmp_path, no_slurm, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert __main__.main([*TINY.split(), *words.split()]) == 2
    found = capsys.readouterr().err
    assert found.startswith(says) and found.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("launcher", "module"), [("slurm", "submitit"), ("ray", "ray")])
def test_missing_extra_is_one_line(launcher, module, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else SimpleNamespace())
    assert __main__.main([*TINY.split(), "--launcher", launcher]) == 2
    found = capsys.readouterr().err
    assert f"{module} is not installed" in found and f"[{launcher}]" in found and found.count("\n") == 1


def test_resume_keeps_number_of_tasks(tmp_path, no_slurm, capsys):
    prepared("--launcher slurm --workers 2", tmp_path / "one").lock.release()
    assert __main__.main(["--resume", str(tmp_path / "one"), "--launcher", "slurm", "--workers", "3"]) == 2
    assert "workers: cannot be combined with resume" in capsys.readouterr().err


def test_environment_object_is_refused(no_slurm, tmp_path):
    from tests.helpers.gym_envs import Walk

    with pytest.raises(ValueError, match="env: workers and launcher require a name"):
        jaxrl_fast.search(
            algo="ppo", env=Walk, over={"gamma": (0.9, 0.99)}, launcher="slurm", search_dir=tmp_path / "one"
        )
    assert not [*tmp_path.iterdir()]


def test_dry_run_says_number_of_tasks(no_slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = TINY.replace("--log-level quiet", "--dry-run") + "--trials 8 --launcher slurm --workers 2"
    assert __main__.main(line.split()) == 0
    assert "· 2 tasks on Slurm ·" in capsys.readouterr().out and not [*tmp_path.iterdir()]


def check_results(folder, number):
    """Check that trials of both tasks are in the table, trained once, and that none has failed."""
    found = rows(folder)
    assert len(found) in range(number, number + 2), "both tasks may draw the last one"
    assert {row["status"] for row in found} == {"complete"}
    assert len({row["learning_rate"] for row in found}) == len(found)
    assert len(work.trials_of(prepare.read(folder))) == len(found)
    assert (folder / "best.yaml").is_file() and "On test seeds" in (folder / "report.md").read_text()
    assert not [*folder.rglob(FAILED)]


@pytest.mark.slow
def test_jobs_share_a_search(tmp_path, no_slurm):
    """Use submitit's local executor, which starts a process for each job."""
    pytest.importorskip("submitit")
    search = prepared("--trials 4 --sampler random --launcher slurm --workers 2", tmp_path / "one")
    search.lock.release()
    jobs = slurm.submit(search.folder, tasks.left(search), {"timeout_min": 9}, tasks.train_as_job, "local")
    assert "the search is done" in [job.result() for job in jobs]
    check_results(tmp_path / "one", 4)


@pytest.mark.slow
def test_ray_tasks_share_a_search(tmp_path, ray):
    options = {"trials": 4, "sampler": "random", "launcher": "ray", "workers": 2, "ray_options": {"num_cpus": 1}}
    base = dict(env="gymnax/CartPole-v1", num_envs=4, total_steps=320, rollout_length=20, num_minibatches=2)
    base |= dict(num_epochs=1, network={"hidden_sizes": [8]}, eval_episodes=4, eval_envs=4, log_level="quiet")
    base |= dict(seeds=1, test_seeds=1, winners=1, over={"learning_rate": (1e-4, 1e-2)})
    folder = tmp_path / "one"
    found = jaxrl_fast.search("ppo_cartpole", search_dir=folder, **base, **options)
    check_results(folder, 4)
    again = jaxrl_fast.search("ppo_cartpole", search_dir=folder, **base, **options)
    assert repr(again.trials) == repr(found.trials), "a finished search is not repeated"
