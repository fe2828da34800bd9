"""Test what a search reads as its space, and how values are drawn from it."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_fast.config.load import from_keywords
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import options_of
from jaxrl_fast.search.spaces import (
    SHIPPED,
    Dimension,
    at,
    default_space,
    distributions,
    drawn_of,
    parse,
    perturb,
    position,
    resample,
    text_of,
    value_of,
)

pytestmark = pytest.mark.unit


def known(algo="ppo", **options):
    return from_keywords(algo=algo, env="CartPole-v1", **options).known


def read(*texts, algo="ppo", **options):
    return parse(texts, known(algo, **options), algo)


def refused(texts, algo="ppo", **options):
    with pytest.raises(ValueError) as error:
        parse(texts, known(algo, **options), algo)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning-rate=1e-5..1e-2", Dimension("learning_rate", "real", 1e-5, 1e-2, "log")),
        ("clip-coef=0.1..0.4", Dimension("clip_coef", "real", 0.1, 0.4, "linear")),
        ("clip-coef=0.07..0.7", Dimension("clip_coef", "real", 0.07, 0.7, "log")),  # 0.7 / 0.07 is 9.999999999999998
        ("entropy-coef=0..1", Dimension("entropy_coef", "real", 0.0, 1.0, "linear")),
        ("entropy-coef=linear:1e-8..0.1", Dimension("entropy_coef", "real", 1e-8, 0.1, "linear")),
        ("clip-coef=log:0.1..0.4", Dimension("clip_coef", "real", 0.1, 0.4, "log")),
        ("gamma=0.9..0.9999", Dimension("gamma", "real", 0.9, 0.9999, "one_minus")),
        ("gae_lambda=0.8..1", Dimension("gae_lambda", "real", 0.8, 1.0, "linear")),  # log(1 - 1) does not exist
        ("gae_lambda=one-minus:0..0.9", Dimension("gae_lambda", "real", 0.0, 0.9, "one_minus")),
        ("beta1=0.5..0.99", Dimension("optimizer.beta1", "real", 0.5, 0.99, "one_minus")),
        ("target-kl=0.01..0.02", Dimension("target_kl", "real", 0.01, 0.02, "linear")),
        ("num-minibatches=2..16", Dimension("num_minibatches", "whole", 2, 16, "power_of_two")),
        ("num-minibatches=2..12", Dimension("num_minibatches", "whole", 2, 12, "linear")),
        ("num-epochs=2..16", Dimension("num_epochs", "whole", 2, 16, "linear")),  # not a size
        ("num-epochs=1..10", Dimension("num_epochs", "whole", 1, 10, "log")),
        ("num-envs=8..64", Dimension("num_envs", "whole", 8, 64, "power_of_two")),
        ("activation=tanh,relu", Dimension("network.activation", "choice", values=("tanh", "relu"))),
        ("normalize-advantage=true,no", Dimension("normalize_advantage", "choice", values=(True, False))),
        ("target-kl=none,0.01", Dimension("target_kl", "choice", values=(None, 0.01))),
        ("hidden-sizes=64 64,128", Dimension("network.hidden_sizes", "choice", values=((64, 64), (128,)))),
        ("schedule=constant,linear", Dimension("schedule", "choice", values=("constant", "linear"))),
    ],
)
def test_parse_reads_text(text, expected):
    assert read(text) == (expected,)


def test_parse_reads_python_values():
    given = {
        "learning_rate": (1e-5, 1e-2),
        "gamma": np.array([0.9, 0.99]),
        "activation": ["tanh", "relu"],
        "hidden_sizes": [(64, 64), 128],
        "normalize_advantage": (True, False),
        "num_epochs": range(2, 5),
        "clip_coef": "log:0.1..0.4",
    }
    assert parse(given, known(), "ppo") == read(
        "learning_rate=1e-5..1e-2",
        "gamma=0.9,0.99",
        "activation=tanh,relu",
        "hidden_sizes=64 64,128",
        "normalize_advantage=true,false",
        "num_epochs=2,3,4",
        "clip_coef=log:0.1..0.4",
    )


def test_parse_reads_shipped_space_which_other_texts_override():
    by_name = {dimension.name: dimension for dimension in read("gamma=0.95,0.99", "default", "num-minibatches=2..16")}
    assert by_name["gamma"].values == (0.95, 0.99)
    assert by_name["num_minibatches"].scale == "power_of_two"
    assert by_name.keys() == {dimension.name for dimension in read("default")} | {"num_minibatches"}
    assert parse({"default": True, "gamma": [0.95, 0.99]}, known(), "ppo") == read("default", "gamma=0.95,0.99")


def test_shipped_space_leaves_out_options_of_absent_parts():
    names = lambda *texts, **options: {dimension.name for dimension in read(*texts, algo="td3", **options)}
    assert names("default") - names("default", target="none") == {"target.tau"}
    assert names("default", "target=average,none") == names("default", target="none") | {"target"}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_shipped_space_has_real_numbers_of_one_program_around_the_defaults(algo):
    options = known(algo)
    for dimension in read(*default_space(algo), algo=algo):
        assert options[dimension.name].traced and dimension.kind == "real"
        default = options[dimension.name].default
        assert dimension.low <= default <= dimension.high, dimension.name
    assert read("default", algo=algo) == read(*default_space(algo), algo=algo)


def test_discounts_of_custom_algorithms_need_no_bounds():
    @dataclasses.dataclass(frozen=True)
    class Config:
        rollout_length: int = 8
        gamma: float = 0.99
        share: float = 0.9

    found = parse(["gamma=0.9..0.99", "share=0.9..0.99"], options_of(Config), "custom")
    assert [dimension.scale for dimension in found] == ["one_minus", "linear"]


def test_every_algorithm_has_a_shipped_space():
    assert SHIPPED.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning-rate=1..2", "over: lerning_rate: unknown option; did you mean learning_rate?"),
        ("lr=1..2", "over: lr: unknown option; did you mean learning_rate?"),
        ("replay.size=1k..1M", "over: replay.size: ppo has no such option; dqn, sac, td3, ddpg have it"),
        ("xyzzy=1..2", "over: xyzzy: unknown option; python -m jaxrl_fast.search --help all lists all"),
        ("seed=0..4", "over: seed: cannot be searched; give it one value, outside of over"),
        ("total-steps=1k..2k", "over: total_steps: cannot be searched; give it one value, outside of over"),
        ("num-seeds=1..2", "over: num_seeds: cannot be searched; give it one value, outside of over"),
        ("env=CartPole-v1,Acrobot-v1", "over: env: cannot be searched; give it one value, outside of over"),
        ("freeze=torso,head", "over: optimizer.freeze: cannot be searched; give it one value, outside of over"),
        ("actor=a,b", "over: actor: cannot be searched; search one of its options"),
        (
            "activation=tan,relu",
            "over: network.activation: must be 'auto' or 'tanh' or 'relu', got 'tan'; did you mean tanh?",
        ),
        ("activation=tanh,", "over: network.activation: has an empty value, got 'tanh,'"),
        ("hidden-sizes=64 64,", "over: network.hidden_sizes: has an empty value, got '64 64,'"),
        ("activation=tanh,tanh", "over: network.activation: has tanh twice; keep one"),
        ("gamma=0.9,0.90", "over: gamma: has 0.9 twice; keep one"),
        ("gamma=0.9", "over: gamma: needs a range or several values, got 0.9; use LOW..HIGH or A,B"),
        ("gamma", "over: must be OPTION=VALUES or default, got 'gamma'; for example learning_rate=1e-5..1e-2"),
        ("defualt", "over: must be OPTION=VALUES or default, got 'defualt'; did you mean default?"),
        ("gamma=0.99..0.9", "over: gamma: the smaller number of a range comes first, got 0.99..0.9"),
        ("gamma=0.9..0.9", "over: gamma: a range needs two different numbers, got 0.9..0.9"),
        ("gamma=0.9..1.1", "over: gamma: must be at least 0 and at most 1, got 1.1"),
        ("learning-rate=0..1", "over: learning_rate: must be above 0, got 0.0"),
        (
            "max-grad-norm=0..1",
            "over: optimizer.max_grad_norm: 0 disables it, so a range must be above 0, got 0..1; begin above 0",
        ),
        ("gamma=a..b", "over: gamma: must be a number, got 'a'"),
        ("gamma=nan..1", "over: gamma: must be a number, got 'nan'"),
        ("gamma=0.9..", "over: gamma: must be a number, got ''"),
        ("num-epochs=1.5..3", "over: num_epochs: must be a whole number (64, 64k, 10M, 1e6), got '1.5'"),
        (
            "hidden-sizes=32..64",
            "over: network.hidden_sizes: takes no range, got 32..64; give several values, separated by commas",
        ),
        ("num-envs=auto,8", "over: num_envs: must be numbers in a search, got auto; name them"),
        ("gamma=lgo:0.9..0.99", "over: gamma: unknown scale 'lgo'; did you mean log?"),
        (
            "entropy-coef=log:0..1",
            "over: entropy_coef: the scale log needs a range above 0, got 0..1; change the range or the scale",
        ),
        (
            "gamma=one-minus:0.5..1",
            "over: gamma: the scale one_minus needs real numbers below 1, got 0.5..1; change the range or the scale",
        ),
        (
            "num-envs=power-of-two:3..8",
            "over: num_envs: the scale power_of_two needs two powers of two, got 3..8; change the range or the scale",
        ),
        (
            "memory.size=64..128",
            "over: memory.size: is an option of memory gru or lstm or lru or MODULE:CLASS, which the run does not "
            "have; choose memory gru",
        ),
    ],
)
def test_parse_refuses_mistakes(text, message):
    assert refused([text]) == message


def test_parse_refuses_spaces_that_contradict_themselves():
    assert refused(["gamma=0.9..0.99", "gamma=0.8,0.9"]) == "over: gamma: given twice; keep one"
    assert refused(["memory=none,gru", "memory.size=16..64"], memory="gru") == (
        "over: memory.size: must exist in every trial, but memory none has no such option; leave one out"
    )
    assert "given twice" in refused(["beta1=0.5..0.9", "optimizer.beta1=0.5..0.9"])
    assert "needs an option" in refused([])
    assert "must name one option, got one for each of replay.size and memory.size" in refused(
        ["size=1k..2k"], "dqn", memory="gru"
    )


def test_shipped_space_of_custom_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"over: default is for ppo, dqn, .*, got my_package.agent; name options"):
        parse("default", known(), "my_package.agent")


def test_text_names_the_scale():
    space = read("gamma=0.9..0.9999", "learning-rate=1e-5..1e-2", "num-envs=8..64", "clip-coef=0.1..0.4")
    assert [*map(text_of, space)] == [
        "gamma 0.9..0.9999 (1 - x, log)",
        "learning_rate 1e-05..0.01 (log)",
        "num_envs 8..64 (powers of two)",
        "clip_coef 0.1..0.4",
    ]
    assert text_of(read("normalize-advantage=true,false")[0]) == "normalize_advantage true, false"


SPACE = read(
    "gamma=0.9..0.9999",
    "learning-rate=1e-5..1e-2",
    "num-envs=8..64",
    "clip-coef=0.1..0.4",
    "entropy-coef=0..1",
    "num-epochs=1..20",
    "rollout-length=3..5",
    "hidden-sizes=64 64,128,256 256",
    "normalize-advantage=true,false",
    "target-kl=none,0.01",
)
NAMES = [dimension.name for dimension in SPACE]


@pytest.mark.parametrize("dimension", SPACE, ids=NAMES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_drawn_variable_is_inverse_of_value(dimension, seed):
    value = resample(dimension, np.random.default_rng(seed))
    distribution = distributions([dimension])[dimension.name]
    drawn = drawn_of(dimension, value)
    assert distribution._contains(distribution.to_internal_repr(drawn))
    assert value_of(dimension, drawn) == value
    assert type(value_of(dimension, drawn)) is type(value)
    assert dimension.kind == "choice" or dimension.low <= value <= dimension.high


@pytest.mark.parametrize("dimension", SPACE, ids=NAMES)
def test_values_drawn_by_optuna_are_in_the_range(dimension):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [study.ask(distributions([dimension])).params[dimension.name] for _ in range(50)]
    values = [value_of(dimension, drawn) for drawn in found]
    if dimension.kind == "choice":
        assert {*values} == {*dimension.values}
    else:
        assert all(dimension.low <= value <= dimension.high for value in values)
        assert len({*values}) > 2
    if dimension.scale == "power_of_two":
        assert {*values} == {8, 16, 32, 64}


@pytest.mark.parametrize("dimension", SPACE, ids=NAMES)
def test_position_is_inverse_of_at_and_covers_the_scale(dimension):
    ends = dimension.values[:: len(dimension.values) - 1] if dimension.values else (dimension.low, dimension.high)
    found = at(dimension, 0.0), at(dimension, 1.0)
    assert found == (pytest.approx(ends) if dimension.kind == "real" else ends)
    assert [position(dimension, value) for value in ends] == pytest.approx([0, 1])
    if dimension.kind == "real":
        assert [position(dimension, at(dimension, share)) for share in (0.2, 0.7)] == pytest.approx([0.2, 0.7])


@pytest.mark.parametrize(
    ("name", "transform"),
    [("gamma", lambda x: -math.log(1 - x)), ("learning_rate", math.log), ("clip_coef", float), ("num_envs", math.log)],
)
def test_resampled_values_are_uniform_on_their_scale(name, transform):
    (dimension,) = (dimension for dimension in SPACE if dimension.name == name)
    rng = np.random.default_rng(0)
    low, high = transform(dimension.low), transform(dimension.high)
    shares = [(transform(resample(dimension, rng)) - low) / (high - low) for _ in range(4000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    spread = math.sqrt(5 / 36) if name == "num_envs" else math.sqrt(1 / 12)  # four points have shares of thirds
    assert np.std(shares) == pytest.approx(spread, abs=0.02)


def test_whole_numbers_on_a_log_scale_include_their_ends():
    (dimension,) = read("num-epochs=1..20")
    rng = np.random.default_rng(0)
    drawn = [resample(dimension, rng) for _ in range(4000)]
    assert drawn.count(1) / 4000 == pytest.approx(math.log(1.5 / 0.5) / math.log(20.5 / 0.5), abs=0.02)
    assert drawn.count(20) / 4000 == pytest.approx(math.log(20.5 / 19.5) / math.log(20.5 / 0.5), abs=0.01)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("learning-rate=1e-5..1e-2", 1e-3, {8e-4, 1.25e-3}),
        ("learning-rate=1e-5..1e-2", 9e-3, {7.2e-3, 1e-2}),  # clipped
        ("gamma=0.9..0.9999", 0.99, {0.992, 0.9875}),  # 1 - gamma: 0.01 times 0.8 and 1.25
        ("gamma=0.9..0.9999", 0.9, {0.92, 0.9}),
        ("entropy-coef=0..1", 0.0, {0.0, 0.1}),  # a factor would never leave 0
        ("clip-coef=0.1..0.4", 0.2, {0.17, 0.23}),
        ("num-envs=8..64", 16, {8, 32}),
        ("num-envs=8..64", 64, {32, 64}),
        ("num-epochs=1..20", 2, {1, 3}),  # 1.6 and 2.5 are no other whole numbers
        ("num-epochs=1..20", 10, {8, 12}),
        ("rollout-length=3..5", 4, {3, 5}),
        ("activation=tanh,relu,auto", "relu", {"tanh", "auto"}),
        ("activation=tanh,relu,auto", "tanh", {"tanh", "relu"}),
        ("hidden-sizes=64 64,128", (128,), {(64, 64), (128,)}),
    ],
)
def test_perturb_moves_one_step_on_the_scale(text, value, expected):
    (dimension,) = read(text)
    rng = np.random.default_rng(0)
    found = {perturb(dimension, value, rng) for _ in range(40)}
    if dimension.kind == "real":
        assert sorted(found) == pytest.approx(sorted(expected))
    else:
        assert found == expected
    assert all(type(one) is type(value) for one in found)


def test_reading_a_space_imports_neither_jax_nor_optuna():
    code = "import sys, jaxrl_fast.search.spaces, jaxrl_fast.search.trials; "
    code += "print([name for name in ('jax', 'numpy', 'optuna') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
