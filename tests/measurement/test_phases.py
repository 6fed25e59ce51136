"""Where the time of a harness goes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tilegym_db.verification.phases import FUZZ, TIME, VERIFY, Phases, merged, processor_seconds


def test_what_threads_take_is_added_up_and_taken_once():
    phases = Phases()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: phases.add(VERIFY, 0.25), range(100)))
    with phases(TIME):
        pass
    taken = phases.take()
    assert taken[VERIFY] == 25.0
    assert taken[TIME] >= 0
    assert phases.take() == {}


def test_time_of_solutions_is_merged_and_not_in_the_sums():
    phases = Phases()
    for seconds in (1.0, 3.0):
        phases.add(FUZZ, seconds, "one")
    phases.add(FUZZ, 0.5, "other")
    assert phases.take() == {}
    one, other = phases.take_spent()
    assert (one.of, one.seconds, one.times) == ("one", 4.0, 2)
    assert one.ended - one.began >= 2.99
    twice = merged([one, other, one])
    assert {part.of: part.seconds for part in twice} == {"one": 8.0, "other": 0.5}
    assert phases.take_spent() == ()


def test_processor_time_counts_live_and_ended_children():
    before = processor_seconds()
    burn = "import time\nwhile time.process_time() < 0.5: pass\n"
    subprocess.run([sys.executable, "-S", "-c", burn], check=True)
    assert processor_seconds() - before >= 0.4
    before = processor_seconds()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", burn + "print(flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processor_seconds() - before >= 0.4
        child.communicate(b"\n")
