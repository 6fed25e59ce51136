from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time

import pytest
from raising import raises

from tilegym_db.errors import HardwareError, MissingPackageError, UsageError
from tilegym_db.measurement import machine
from tilegym_db.measurement.benchmark import bench
from tilegym_db.measurement.machine import connected, max_devices, parse_executor, parse_gpus


@pytest.mark.parametrize(
    ("text", "variable", "found"),
    [
        ("ray", "", "auto"),
        ("ray", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("ray:head:6379", "10.0.0.1:6379", "head:6379"),
        ("ray://head:10001", "", "ray://head:10001"),
        ("ray:[fd00::1]:6379", "", "[fd00::1]:6379"),
    ],
)
def test_an_executor_names_a_cluster(monkeypatch, text, variable, found):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert parse_executor(text) == found


@pytest.mark.parametrize(
    "text", ["", "slurm", "ray:", "ray:head", "ray:head:port", "ray:head:99999", "head:6379", "Ray"]
)
def test_what_names_none_is_refused_with_how_to_name_one(text):
    with raises(UsageError, "executor_invalid", "ray:HOST:6379"):
        parse_executor(text)


def test_gpus_of_a_cluster_are_counted_and_not_named():
    assert [max_devices(gpus) for gpus in (None, parse_gpus("all"), parse_gpus("3"))] == [None, None, 3]
    with raises(UsageError, "gpu_indices_refused", "0,2"):
        max_devices(parse_gpus("0,2"))


def test_without_ray_the_extra_is_named(monkeypatch, home):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"tilegym-db\[ray\]"):
        bench(("rms_norm",), devices="ray:127.0.0.1:6379")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.turn("tilegym_db/measurement/machine.py")  # waits for a connection
def test_silent_address_is_refused_within_seconds_in_a_sentence(home):
    pytest.importorskip("ray")
    began = time.monotonic()
    command = [sys.executable, "-m", "tilegym_db", "verify", "rms_norm", "--gpu", "cpu"]
    command += ["--executor", f"ray:127.0.0.1:{free_port()}"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "127.0.0.1:" in answer.stderr
    assert "ray start --head" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert time.monotonic() - began < 30  # most of it is PyTorch


@pytest.mark.turn("tilegym_db/measurement/machine.py")  # a process that loads Ray
@pytest.mark.slow
def test_port_that_is_not_rays_is_refused_in_a_fresh_process(monkeypatch):
    """Ray itself would try for a minute, and then end the process."""
    pytest.importorskip("ray")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        script = (
            "from tilegym_db.measurement import machine\n"
            f"with machine.connected('127.0.0.1:{listener.getsockname()[1]}', patience_s=2.0): pass\n"
        )
        answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 1
    assert "nothing within 2 s" in answer.stderr


@pytest.mark.parametrize(
    ("error", "code", "fact"),
    [
        (
            ConnectionError("Could not find any running Ray instance."),
            "cluster_silent",
            "Could not find any",
        ),
        (
            RuntimeError("Version mismatch:\n  Ray: 2.49.0"),
            "cluster_unusable",
            "Version mismatch: Ray: 2.49.0.",
        ),
    ],
)
def test_message_of_ray_is_given_in_a_sentence(monkeypatch, error, code, fact):
    pytest.importorskip("ray")

    def refuse(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with raises(HardwareError, code, fact), connected(machine.AUTO):
        pass
