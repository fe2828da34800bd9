"""gpu_check.launches: counts of a program written by hand, and of one that XLA has compiled."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_fast.gpu_check.launches import read

pytestmark = pytest.mark.unit

PROGRAM = """
HloModule jit_train

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} add(%p, %p)
  ROOT %m = f32[8]{0} multiply(%a, %a)
}

%step (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8]{0} get-tuple-element(%carry), index=1
  %copied = f32[8]{0} copy(%x)
  %next = s32[] fusion(%i), kind=kLoop, calls=%fused
  %y = f32[8]{0} fusion(%copied), kind=kLoop, calls=%fused
  %all-reduce-start = f32[8]{0} all-reduce-start(%y), replica_groups={{0,1}}
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%next, %all-reduce-done)
}

%small (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}

%large (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %c = f32[8]{0} copy(%q)
  ROOT %f = f32[8]{0} fusion(%c), kind=kLoop, calls=%fused
}

%update (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %w = (s32[], f32[8]{0}) while(%carry), condition=%yes, body=%step, LOOP
  %x = f32[8]{0} get-tuple-element(%w), index=1
  %gemm = (f32[8]{0}, s8[4]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  %z = f32[8]{0} get-tuple-element(%gemm), index=0
  %flag = pred[] fusion(%z), kind=kLoop, calls=%fused
  %b = f32[8]{0} conditional(%flag, %z, %z), true_computation=%small, false_computation=%large
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%carry, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %tuple = (s32[], f32[8]{0}) tuple(%zero, %x)
  %w = (s32[], f32[8]{0}) while(%tuple), condition=%yes, body=%update, metadata={op_name="jit(train)/while"}
  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1
}
"""

LOOP = 'metadata={op_name="jit(train)/while/body/gradient_steps/while"}, backend_config={"known_trip_count":{"n":"5"}}'


def test_loops_of_program_are_counted():
    program = read(PROGRAM.replace("LOOP", LOOP))
    (update,) = program.inner
    step, branch = update.inner
    assert (program.kernels, update.trips, step.trips) == (0, None, 5)
    assert (step.kernels, step.copies, step.collectives) == (4, 1, 1)  # the done half of a collective starts nothing
    assert (update.kernels, update.branches, branch.kernels, branch.copies) == (2, 1, 2, 1)  # the larger side
    assert update.total == 2 + 5 * 4 + 2
    assert update.waits == 1 and program.waits == 2


def test_find_returns_loop_of_scope():
    program = read(PROGRAM.replace("LOOP", LOOP))
    assert program.find("gradient_steps") is program.inner[0].inner[0]
    assert program.find("gradient") is None and program.find("environment_steps") is None


def test_compiled_program_is_read():
    """XLA's text for a CPU has the same form: two nested loops, of which one has a known number of passes."""

    def nested(x, count):
        inner = lambda _, x: jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(x) @ x, x)
        return jax.lax.fori_loop(0, count, inner, x)

    program = read(jax.jit(nested).lower(jnp.zeros((64, 64)), 3).compile().as_text())
    (outer,) = program.inner
    assert outer.trips is None and 7 in [loop.trips for _, loop in outer.depth_first()]
