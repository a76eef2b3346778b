"""The graph allocator: packing by hand."""

from __future__ import annotations

from residency.engines.llama_cpp.arena import Tape

STEP = 128


def test_a_chain_needs_two_places():
    tape = Tape()
    cur = tape.op(10 * STEP)
    for _ in range(6):
        cur = tape.op(10 * STEP, cur)
    assert tape.peak() == 20 * STEP


def test_an_operation_in_place_takes_its_inputs_place():
    tape = Tape()
    cur = tape.op(10 * STEP)
    for _ in range(6):
        cur = tape.same(10 * STEP, cur)
    assert tape.peak() == 10 * STEP


def test_an_input_that_is_needed_again_is_not_taken_over():
    tape = Tape()
    x = tape.op(10 * STEP)
    y = tape.same(10 * STEP, x)
    tape.op(STEP, x, y)
    assert tape.peak() == 21 * STEP


def test_a_view_keeps_its_source():
    tape = Tape()
    x = tape.op(10 * STEP)
    v = tape.view(x)
    other = tape.op(10 * STEP)
    tape.op(STEP, v, other)
    assert tape.peak() == 21 * STEP


def test_sizes_are_rounded_up():
    tape = Tape()
    a = tape.op(1)
    b = tape.op(1)
    tape.op(1, a, b)
    assert tape.peak() == 3 * STEP


def test_the_best_hole_is_taken():
    """A hole of 4 and one of 8: three go to the smaller."""
    tape = Tape()
    wide = tape.op(8 * STEP)
    wall = tape.op(STEP)
    slim = tape.op(4 * STEP)
    end = tape.op(STEP)
    used = tape.op(STEP, wide, slim)  # both free from here on
    three = tape.op(3 * STEP, used)
    eight = tape.op(8 * STEP, three)
    tape.op(STEP, wall, end, three, eight)
    assert tape.peak() == 15 * STEP


def test_what_is_kept_is_never_given_back():
    tape = Tape()
    tape.keep(5 * STEP)
    cur = tape.op(STEP)
    tape.op(STEP, cur)
    assert tape.peak() == 7 * STEP


def test_operations_that_run_as_one_live_together():
    apart, one = Tape(), Tape()
    for tape in (apart, one):
        a = tape.op(4 * STEP)
        b = tape.op(4 * STEP, a)
        c = tape.op(4 * STEP, b)
        if tape is one:
            tape.hold(a)
        tape.op(STEP, c)
    assert apart.peak() == 8 * STEP
    assert one.peak() == 12 * STEP
