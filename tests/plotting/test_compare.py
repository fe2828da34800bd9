"""Test the comparison of runs: how they are grouped into curves, named and averaged."""

import errno
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from jaxrl_fast import evaluate, plot
from jaxrl_fast.metrics import statistics
from jaxrl_fast.plotting import compare, curves
from jaxrl_fast.utils import files

pytestmark = pytest.mark.unit


def write(folder, records, **options):
    """Create a run's folder with only a configuration and records."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", **options, "meta": {"format": 3}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def records(seed, returns, step=100, seconds=1.0, **more):
    """Return records of two episodes each, `step` environment steps and `seconds` apart."""
    return [
        {"seed": seed, "env_steps": step * i, "train_time_s": seconds * i, "episodes": 2, "return_mean": x, **more}
        for i, x in enumerate(returns, 1)
    ]


def draw(places, **options):
    (axes,) = compare.compare(places, **options).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    return axes, dict(zip(labels, axes.get_lines()))


def test_compare_averages_seeds_of_several_runs(tmp_path):
    """The interquartile mean of 0, 1, 2, 3, 40 is 2; at the second record all returns are 1.5 times as high."""
    scores = [0.0, 1.0, 2.0, 3.0, 40.0]
    places = [write(tmp_path / f"r{i}", records(i, [x, 1.5 * x]), seed=i) for i, x in enumerate(scores)]
    axes, lines = draw(places)
    (line,) = lines.values()
    np.testing.assert_allclose(line.get_xdata(), [100, 200])
    np.testing.assert_allclose(line.get_ydata(), [2, 3])
    low, high = statistics.bootstrap(np.array(scores)[:, None, None] * [1.0, 1.5], num_resamples=500)
    edges = axes.collections[0].get_paths()[0].vertices
    assert edges[:, 1].min() == pytest.approx(low.min()) and edges[:, 1].max() == pytest.approx(high.max())
    assert list(lines) == ["ppo on CartPole-v1 (5 seeds)"]


def test_curve_names_show_differing_options(tmp_path):
    for num_envs in (256, 8, 64):
        write(tmp_path / str(num_envs), records(0, [1.0, 2.0]), num_envs=num_envs, hidden_sizes=[8])
    assert list(draw([tmp_path])[1]) == ["num envs 8", "num envs 64", "num envs 256"]  # by size
    write(tmp_path / "dqn", records(0, [1.0]), num_envs=8, algo="dqn")
    write(tmp_path / "two", records(0, [1.0]), num_envs=8, hidden_sizes=[8], gamma=0.5)
    names = list(draw([tmp_path / "8", tmp_path / "two"])[1])
    assert names == ["gamma 0.5", "gamma 0.99"]
    assert list(draw([tmp_path / "8", tmp_path / "dqn"])[1]) == ["dqn", "ppo"]


def test_repeated_seed_starts_another_curve(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, records(0, [1.0, 2.0]))
    assert list(draw([tmp_path])[1]) == ["ppo on CartPole-v1 (a)", "ppo on CartPole-v1 (b)"]


def test_repeated_seeds_form_one_curve_per_repetition(tmp_path):
    for name in ("a", "b", "c"):
        for seed in range(4):
            write(tmp_path / f"{name}_s{seed}", records(seed, [1.0, 2.0]), seed=seed)
    assert list(draw([tmp_path])[1]) == [f"ppo on CartPole-v1 ({name}_s0) (4 seeds)" for name in ("a", "b", "c")]


def test_duplicate_run_paths_are_ignored(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        write(tmp_path / "runs" / name, records(0, [1.0, 2.0]))
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    assert plot.main(["link", "runs/a", str(tmp_path / "runs" / "a"), "runs", "--group-by", "env"]) == 0
    assert capsys.readouterr().out == "plot.png   1 curve of 2 runs\n"
    assert list(draw(["link", "runs"])[1]) == ["ppo on CartPole-v1 (link)", "ppo on CartPole-v1 (b)"]


def test_curve_names_have_at_most_three_options_unless_ambiguous(tmp_path):
    """Show three options, and a fourth for runs that differ in nothing else."""
    for i, (num_envs, clip) in enumerate([(8, 0.1), (8, 0.2), (64, 0.1)]):
        agent = {"gamma": num_envs / 100, "clip_coef": clip}
        write(tmp_path / str(i), records(0, [1.0 + i]), num_envs=num_envs, total_steps=1000 * num_envs, **agent)
    common = "num envs 8, total steps 8000, gamma 0.08"
    drawn = draw([tmp_path])[1]
    names = [f"{common}, clip coef 0.1", f"{common}, clip coef 0.2", "num envs 64, total steps 64000, gamma 0.64"]
    assert {name: line.get_ydata()[0] for name, line in drawn.items()} == dict(zip(names, [1, 2, 3]))


def test_equal_curve_names_get_folders(tmp_path):
    places = [write(tmp_path / name / "run", records(0, [1.0])) for name in ("a", "b")]
    names = [f"ppo on CartPole-v1 ({place})" for place in places]
    assert list(draw(places)[1]) == names
    backends = [write(tmp_path / name, records(0, [1.0]), env=f"{name}/CartPole-v1") for name in ("envpool", "gymnax")]
    assert list(draw(backends)[1]) == ["CartPole-v1, envpool/CartPole-v1", "CartPole-v1, gymnax/CartPole-v1"]


def test_members_of_one_program_are_separate_curves(tmp_path):
    lines = [
        r for rate in (0.1, 0.2) for seed in (0, 1) for r in records(seed, [rate], **{"option.learning_rate": rate})
    ]
    write(tmp_path / "a", lines, num_seeds=2)
    drawn = draw([tmp_path / "a"])[1]
    assert list(drawn) == ["learning rate 0.1 (2 seeds)", "learning rate 0.2 (2 seeds)"]
    assert [line.get_ydata()[0] for line in drawn.values()] == [0.1, 0.2]


def test_group_by_selects_curves(tmp_path):
    for seed, (num_envs, gamma) in enumerate([(8, 0.9), (8, 0.99), (64, 0.9)]):
        write(tmp_path / str(seed), records(seed, [1.0 + seed]), num_envs=num_envs, gamma=gamma, seed=seed)
    assert list(draw([tmp_path], group_by=["num-envs"])[1]) == ["num envs 8 (2 trainings)", "num envs 64"]
    assert list(draw([tmp_path], group_by="gamma")[1]) == ["gamma 0.9 (2 trainings)", "gamma 0.99"]


def test_group_by_accepts_last_word_of_path(tmp_path):
    for seed, size in enumerate([64, 64, 128]):
        write(tmp_path / str(seed), records(seed, [1.0 + seed]), seed=seed, memory={"kind": "gru", "size": size})
    names = ["memory size 64 (2 seeds)", "memory size 128"]
    assert list(draw([tmp_path], group_by="size")[1]) == list(draw([tmp_path], group_by="memory.size")[1]) == names
    write(tmp_path / "dqn", records(3, [1.0]), seed=3, algo="dqn")
    says = "group_by: must name one option, got size for memory.size and replay.size; use a whole name"
    with pytest.raises(ValueError, match=f"^{says}$"):
        compare.compare([tmp_path], group_by="size")


def test_group_by_never_averages_different_envs(tmp_path):
    for name in ("CartPole-v1", "Acrobot-v1"):
        write(tmp_path / name, records(0, [1.0]), env=name, gamma=0.9)
    axes = compare.compare([tmp_path], group_by="gamma").axes
    titles = sorted(at.get_title(loc="left") for at in axes)
    assert titles == ["PPO on Acrobot-v1", "PPO on CartPole-v1"]
    assert all(len(at.get_lines()) == 1 for at in axes)


def test_compare_warns_if_trainings_differ_in_length(tmp_path, capsys):
    """Warn along steps, but not along episodes."""
    places = [write(tmp_path / str(n), records(n, [1.0] * n), seed=n) for n in (2, 30)]
    draw(places)
    message = "drawn up to the end of its shortest training, 200 of 3k environment steps"
    assert capsys.readouterr().err == f"warning: ppo on CartPole-v1: {message}\n"
    draw(places, x="episodes")
    assert not capsys.readouterr().err


def test_compare_has_panel_per_env(tmp_path):
    """Backends of one environment share a panel."""
    envs = ["gymnax/CartPole-v1", "gymnax/Acrobot-v1", "envpool/CartPole-v1"]
    places = [write(tmp_path / str(i), records(0, [1.0 + i]), env=env) for i, env in enumerate(envs)]
    acrobot, cartpole = sorted(compare.compare(places).axes, key=lambda axes: len(axes.get_lines()))
    assert acrobot.get_title("left") == "PPO on gymnax/Acrobot-v1"
    assert cartpole.get_title("left") == "PPO on envpool/CartPole-v1, gymnax/CartPole-v1"
    assert sorted(float(line.get_ydata()[0]) for line in cartpole.get_lines()) == [1, 3]


def test_curve_starts_when_all_trainings_have_values(tmp_path):
    """A later gap keeps the last value."""
    one = write(tmp_path / "one", records(0, [None, 2.0, None, 4.0]))
    np.testing.assert_array_equal(draw([one])[0].get_lines()[0].get_ydata(), [np.nan, 2, 2, 4])
    other = write(tmp_path / "other", records(1, [5.0, None, 7.0, 8.0]), seed=1)
    _, lines = draw([one, other])
    np.testing.assert_allclose(lines["ppo on CartPole-v1 (2 seeds)"].get_ydata(), [np.nan, 3.5, 4.5, 6])


def test_aggregate_ignores_training_without_values():
    each = np.array([[1.0, 2.0], [np.nan, np.nan], [3.0, 4.0]])
    np.testing.assert_allclose(curves.aggregate("", np.array([1, 2]), each).center, [2, 3])
    assert np.isnan(curves.aggregate("", np.array([1, 2]), each[[1, 1]]).center).all()


def test_runs_without_metric_are_left_out_with_warning(tmp_path, capsys):
    with_it, without = (write(tmp_path / name, records(0, [1.0], **{name: 1.0})) for name in ("loss", "entropy"))
    assert len(draw([with_it, without], y="loss")[1]) == 1
    assert capsys.readouterr().err == "warning: 1 of 2 runs have no loss and are left out\n"


def test_run_of_unknown_algorithm_is_left_out_with_warning(tmp_path, capsys):
    write(tmp_path / "ours", records(0, [1.0, 2.0]))
    gone = write(tmp_path / "theirs", records(0, [1.0, 2.0]), algo="a_module.that_is_gone")
    (found,) = compare.group_runs([tmp_path], compare.Options()).values()
    assert [run.folder.name for run in found] == ["ours"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"warning: {gone} is left out: unknown algorithm")
    assert evaluate.main([str(gone)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'a_module.that_is_gone' in " in said
    assert "; there are ppo, dqn, pqn, sac, td3, ddpg, reppo, and modules by name" in said


def test_legend_shows_name_with_leading_underscore():
    """Use the name of a class in a script, __main__:Line."""
    curve = curves.Curve("__main__:Line", np.arange(3.0), np.ones((1, 3)), np.ones(3), None)
    (axes,) = curves.draw_panels({"": [curve]}, "steps", "return").axes
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["__main__:Line"]


def test_legend_of_many_curves_is_outside_axes(tmp_path):
    """Long names are shortened to fit."""
    places = [write(tmp_path / f"{i:02}" / ("long" * 30), records(0, [1.0 * i, 2.0])) for i in range(12)]
    picture = compare.compare(places)
    picture.draw_without_rendering()
    (axes,) = picture.axes
    legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.x0 > inside.x1 and inside.width > 400 and legend.y0 > 0
    assert legend.x1 < picture.bbox.x1
    assert all(len(text.get_text()) <= 70 for text in axes.get_legend().get_texts())


@pytest.mark.parametrize(("x", "label", "at"), [("seconds", "seconds", [3, 6]), ("episodes", "episodes", [2, 4])])
def test_option_x_selects_horizontal_axis(tmp_path, x, label, at):
    axes, lines = draw([write(tmp_path / "a", records(0, [1.0, 2.0], seconds=3.0))], x=x)
    assert label in axes.get_xlabel()
    (line,) = lines.values()
    np.testing.assert_allclose(line.get_xdata(), at)
    np.testing.assert_allclose(line.get_ydata(), [1, 2])


def test_option_y_selects_metric(tmp_path):
    axes, lines = draw([write(tmp_path / "a", records(0, [1.0, 2.0], policy_loss=7.0))], y="policy_loss")
    assert axes.get_ylabel() == "policy loss" and (next(iter(lines.values())).get_ydata() == 7).all()


def test_curve_ends_with_shortest_training(tmp_path):
    """At 100 and 200 both seeds have values; later steps belong to one seed only."""
    places = [write(tmp_path / str(i), records(i, [1.0] * (2 + 3 * i)), seed=i) for i in range(2)]
    (line,) = draw(places)[1].values()
    np.testing.assert_allclose(line.get_xdata(), [100, 200])


def test_curve_reaches_first_record_of_each_training(tmp_path):
    """One training ends at 200 with 1, the other has its first record, 5, at 1000: the mean there is 3."""
    places = [write(tmp_path / "0", records(0, [1.0] * 2)), write(tmp_path / "1", records(1, [5.0] * 2, 1000), seed=1)]
    (line,) = draw(places)[1].values()
    assert line.get_xydata().tolist() == [[1000, 3]]


def test_bin_means_are_weighted():
    """(0, 10] holds 1 and 4 with weights 3 and 1: 7/4. (10, 20] is empty. NaN has no weight."""
    x, y = np.array([5.0, 10.0, 15.0, 25.0, 30.0]), np.array([1.0, 4.0, 9.0, np.nan, 5.0])
    means = curves.bin_means(x, y, np.array([3.0, 1.0, 0.0, 1.0, 2.0]), np.array([0.0, 10.0, 20.0, 30.0]))
    np.testing.assert_allclose(means, [7 / 4, np.nan, 5.0])
    np.testing.assert_allclose(curves.forward_fill(np.array([[np.nan, 1.0, np.nan, 2.0]])), [[np.nan, 1, 1, 2]])


def test_plot_command_never_overwrites_default_file(tmp_path, monkeypatch, capsys):
    write(tmp_path / "runs" / "a", records(0, [1.0, 2.0]))
    monkeypatch.chdir(tmp_path)
    for name in ("plot.png", "plot-2.png"):
        assert plot.main(["runs"]) == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and name in capsys.readouterr().out
    assert plot.main(["runs/a", "--out", "a.svg"]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_claimed_removes_file_on_error(tmp_path):
    with pytest.raises(OSError, match="disk"), files.claimed(tmp_path / "x.png") as path:
        assert path.exists()
        raise OSError("the disk is full")
    assert not path.exists()
    with files.claimed(tmp_path / "x.png") as path:
        path.write_text("drawn")
    assert path.read_text() == "drawn"


def test_claim_file_is_atomic(tmp_path, monkeypatch):
    """Let another process create the file between the check and the creation."""
    wanted, free = tmp_path / "plot.png", files.new_file
    assert [files.claim_file(wanted).name for _ in range(2)] == ["plot.png", "plot-2.png"]
    looks = iter([tmp_path / "plot-2.png", tmp_path / "plot-2.png"])
    monkeypatch.setattr(files, "new_file", lambda path: next(looks, None) or free(path))
    assert files.claim_file(wanted).name == "plot-3.png"
    assert len(list(tmp_path.iterdir())) == 3


def test_curve_names_print_dollar_signs_literally(tmp_path, monkeypatch):
    """Look for the texts in an SVG."""
    for name in ("a b", "x$a_{$y^"):
        write(tmp_path / name, records(0, [1.0, 2.0], **{"$a_{$": 1.0}), env="Mine$:x_{$")
    monkeypatch.chdir(tmp_path)
    assert plot.main(["a b", "x$a_{$y^", "--y", "$a_{$", "--out", "x.svg"]) == 0
    text = (tmp_path / "x.svg").read_text()
    for words in ("ppo on Mine$:x_{$ (a b)", "ppo on Mine$:x_{$ (x$a_{$y^)", "PPO on Mine$:x_{$", "$a {$"):
        assert f"<!-- {words} -->" in text


def test_compare_option_out_saves_figure(tmp_path):
    folder, out = write(tmp_path / "a", records(0, [1.0, 2.0])), tmp_path / "a.svg"
    assert compare.compare([folder], out=str(out)).axes and "<svg" in out.read_text()
    assert compare.compare(str(folder)).axes and compare.compare(SimpleNamespace(folder=folder)).axes  # a run, too
    assert compare.compare(tmp_path.glob("a")).axes
    with pytest.raises(ValueError, match="runs: got an empty list"):
        compare.compare([])
    with pytest.raises(ValueError, match=r"^out: must end with .png or .svg or .pdf, got '.*a.jpg'; rename it$"):
        compare.compare([folder], out=str(tmp_path / "a.jpg"))
    assert sorted(tmp_path.iterdir()) == [folder, out]


MISTAKES = [
    ("", ["RUN... is missing"]),
    ("nowhere", ["nowhere: no run found in it or below"]),
    ("rums", ["did you mean runs?"]),
    ("empty", ["empty: no run found in it or below", "config.yaml"]),
    ("runs --y retrun_mean", ["error: y:", "got retrun_mean", "did you mean return_mean"]),
    ("runs --y frobnication", ["error: y:", "got frobnication", "available: ", "env_steps"]),
    ("runs --x stepz", ["error: x: ", "did you mean steps?"]),
    ("runs --outt a.png", ["error: outt: ", "did you mean out?"]),
    ("runs --out a.jpg", ["error: out: must end with .png or .svg or .pdf, got 'a.jpg'; rename it\n"]),
    (
        "runs --out nowhere/a.png",
        ["error: out: must be in an existing folder, got 'nowhere/a.png'; create 'nowhere'\n"],
    ),
    ("runs --group-by num-env", ["error: group_by:", "got num-env", "num_envs"]),
    ("broken", ["broken/a", "metrics.jsonl cannot be read (line 1: "]),
    ("numbers", ["numbers/a", "metrics.jsonl cannot be read (line 1: "]),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_invalid_command_line_prints_one_line_and_writes_nothing(line, words, tmp_path, monkeypatch, capsys):
    write(tmp_path / "runs" / "a", records(0, [1.0]))
    (write(tmp_path / "broken" / "a", []) / "metrics.jsonl").write_text("{\n")
    (write(tmp_path / "numbers" / "a", []) / "metrics.jsonl").write_text("3\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert plot.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert sorted(tmp_path.rglob("*")) == before


def test_unreadable_run_is_left_out_with_warning(tmp_path, capsys):
    """An incomplete last line is ignored."""
    write(tmp_path / "a", records(0, [1.0]))
    (write(tmp_path / "b", []) / "metrics.jsonl").write_text("garbage\n")
    with open(write(tmp_path / "c", records(0, [2.0])) / "metrics.jsonl", "a") as file:
        file.write('{"seed": 0, "env_st')
    found = compare.group_runs([tmp_path], compare.Options())
    assert sorted(run.folder.name for runs in found.values() for run in runs) == ["a", "c"]
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1 and "b is left out: its metrics.jsonl cannot be read (line 1: " in warned


def test_save_failure_keeps_existing_file(tmp_path):
    class Torn:
        def savefig(self, path):
            path.write_text("half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.png"
    path.write_text("whole")
    with pytest.raises(OSError, match="No space left") as error:
        curves.save(Torn(), path)
    assert path.read_text() == "whole" and [*tmp_path.iterdir()] == [path] and error.value.filename == str(path)


def test_plot_rejects_runs_without_finished_episode(tmp_path, capsys):
    folder = write(tmp_path / "a", records(0, [None, None], loss=1.0))
    assert plot.main([str(folder)]) == 2
    said = "y: no episode has finished yet in these runs, got return_mean; wait, or draw another metric"
    assert capsys.readouterr().err == f"error: {said}\n"
    assert draw([folder], y="loss")


@pytest.mark.parametrize(("text", "why"), [("", "the file is empty"), ("num_envs: [1", "not readable as YAML")])
def test_run_with_unreadable_config_is_left_out_with_warning(tmp_path, capsys, text, why):
    write(tmp_path / "a", records(0, [1.0]))
    broken = write(tmp_path / "b", records(1, [2.0]))
    (broken / "config.yaml").write_text(text)
    (found,) = compare.group_runs([tmp_path], compare.Options()).values()
    assert [run.folder.name for run in found] == ["a"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"warning: {broken} is left out: ") and why in said
    assert plot.main([str(broken)]) == 2
    assert why in capsys.readouterr().err


def test_compare_accepts_folder_names_that_are_not_utf8(tmp_path):
    for name in (b"\xff", b"b"):
        write(tmp_path / os.fsdecode(name), records(0, [1.0, 2.0]))
    out = tmp_path / os.fsdecode(b"\xfe.png")
    compare.compare([tmp_path], out=str(out))
    assert out.stat().st_size


def test_compare_rejects_record_with_text_instead_of_number(tmp_path):
    folder = write(tmp_path / "a", records(0, [1.0, "high"]))
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be read \(line 2: .*return_mean: must be a number"):
        compare.compare([folder])
