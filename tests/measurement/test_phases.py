"""Where the time of a harness goes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tilegym_db.verification.phases import TIME, VERIFY, Phases, processor_seconds


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
