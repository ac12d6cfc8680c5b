"""A command under its supervisor: output, time, and an end that is an end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE, until
from processes import DAEMON, alive, marker

from longrein.harnesses.program import KEPT_BYTES, Clipped, Program

ENV = {"PATH": os.environ["PATH"]}


def test_a_short_stream_is_kept_whole() -> None:
    clipped = Clipped(10)
    for piece in (b"abc", b"", b"defg", b"hij"):
        clipped.add(piece)
    assert clipped.text() == "abcdefghij"


def test_of_a_long_stream_the_head_and_the_tail_are_kept_however_it_was_cut() -> None:
    stream = bytes(range(97, 123)) * 20
    for size in (1, 3, 7, 100, 520):
        clipped = Clipped(10)
        for start in range(0, len(stream), size):
            clipped.add(stream[start : start + size])
        assert clipped.text() == "abcde\n[510 bytes left out]\nvwxyz"
        assert clipped.size == 520


def test_fifty_megabytes_are_read_and_a_megabyte_is_kept(tmp_path: Path) -> None:
    flood = "import sys; [sys.stdout.write('x' * 1_000_000) for _ in range(50)]; print('the end'); sys.exit(4)"
    program = Program([sys.executable, "-c", flood], env=ENV, cwd=tmp_path)
    assert program.ended.result(timeout=PATIENCE) == 4
    assert program.stdout.size == 50_000_008
    assert program.stdout.text().endswith("xthe end\n")
    assert len(program.stdout.text()) < KEPT_BYTES + 100


def test_bytes_that_are_no_text_are_no_error(tmp_path: Path) -> None:
    program = Program(["printf", "\\377ok"], env=ENV, cwd=tmp_path)
    program.ended.result(timeout=PATIENCE)
    assert program.stdout.text() == "\ufffdok"


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    mark, began = marker(), time.monotonic()
    program = Program(["sh", "-c", "sleep 100; true", mark], env=ENV, cwd=tmp_path, timeout=0.5)
    assert program.ended.result(timeout=PATIENCE) == 137
    assert program.timed_out
    assert time.monotonic() - began >= 0.5
    assert alive(mark) == []


def test_a_program_that_ends_in_time_did_not_time_out(tmp_path: Path) -> None:
    program = Program(["true"], env=ENV, cwd=tmp_path, timeout=PATIENCE)
    assert program.ended.result(timeout=PATIENCE) == 0
    assert not program.timed_out


def test_stop_ends_it_with_what_it_wrote_and_again_is_nothing(tmp_path: Path) -> None:
    mark = marker()
    program = Program([sys.executable, "-c", DAEMON, "100", mark], env=ENV, cwd=tmp_path)
    assert until(lambda: len(alive(mark)) == 3 and program.stdout.size)
    program.stop()
    program.stop()
    assert program.stdout.text() == "started\n"
    assert alive(mark) == []


def test_a_program_that_kills_its_supervisor_gets_no_further(tmp_path: Path) -> None:
    mark = marker()
    rebel = f"setsid sh -c 'sleep 100; true' {mark} & kill -KILL $PPID; sleep 100; true"
    program = Program(["sh", "-c", rebel, mark], env=ENV, cwd=tmp_path)
    assert program.ended.result(timeout=PATIENCE) == 137
    assert alive(mark) == []


def test_a_program_that_stops_its_supervisor_ends_as_others_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = marker()
    program = Program(["sh", "-c", "kill -STOP $PPID; sleep 100; true", mark], env=ENV, cwd=tmp_path, timeout=0.5)
    assert program.ended.result(timeout=PATIENCE) == 137
    assert caplog.text == ""  # the supervisor answered: it did not have to be killed, which is said
    assert alive(mark) == []


def test_many_file_numbers_are_no_trouble(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        program = Program(["echo", "fine"], env=ENV, cwd=tmp_path)
        assert program.ended.result(timeout=PATIENCE) == 0
        assert program.stdout.text() == "fine\n"
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
