from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilegym_db.paths import remove_tree, scratch_folder, sweep

HOLDER = """
import sys, time
from pathlib import Path
from tilegym_db.paths import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "file").write_text("content")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_scratch_folder_is_private_and_goes_with_its_content(tmp_path):
    with scratch_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "a/b").mkdir(parents=True)
        (folder / "a/b/file").write_text("content")
    assert list(tmp_path.iterdir()) == []


def test_it_goes_when_its_user_raises(tmp_path):
    with pytest.raises(KeyError), scratch_folder(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_processes_are_swept_live_ones_kept(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        with scratch_folder(tmp_path):
            assert (held / "file").exists()
        holder.send_signal(signal.SIGKILL)
    assert held.exists()
    with scratch_folder(tmp_path) as folder:
        assert [path for path in tmp_path.iterdir() if path != folder] == []


def test_unlocked_folder_is_left_alone_until_it_is_old(tmp_path):
    fresh, old = tmp_path / "tilegym-db-scratch-fresh", tmp_path / "tilegym-db-scratch-old"
    fresh.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    assert sweep(tmp_path) == [old]
    assert fresh.exists()


def test_links_and_other_names_are_not_swept(tmp_path):
    target = tmp_path / "other"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "tilegym-db-scratch-link").symlink_to(target)
    assert sweep(tmp_path) == []
    assert (target / "lock").exists()


def test_a_folder_is_removed_however_it_was_left(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("stays")
    (folder / "closed/inner").mkdir(parents=True)
    (folder / "closed/inner/file").write_text("goes")
    (folder / "link").symlink_to(outside)
    (folder / "closed").chmod(0)
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(40):  # deeper than a path can say
        os.mkdir("deep" * 50)
        os.chdir("deep" * 50)
    os.chdir(here)
    remove_tree(folder)
    assert not folder.exists()
    assert (outside / "file").read_text() == "stays"


def test_removing_what_is_not_there_is_no_error(tmp_path):
    remove_tree(tmp_path / "nothing")
