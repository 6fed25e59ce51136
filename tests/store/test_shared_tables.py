"""Resolver tables that a team shares: two installations, a folder or a real S3 server, and what happens to damaged files."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.cli.doctor import check_shared_tables
from tilegym_db.published.input_files import LOCK_NAME, packed, unpacked
from tilegym_db.published.shared_tables import SharedPlace, tables_in
from tilegym_db.published.snapshot import sha256, signed_line
from tilegym_db.published.table import ResolverTable, load_table
from tilegym_db.records import Trace
from tilegym_db.resolver.explain import shared_tables
from tilegym_db.store.filling import ingest, overrule
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import FetchedTables, fetch_tables, publish, share_tables

pytestmark = pytest.mark.sweep(2)

GPU = "l4"  # nothing of it is shipped
BFLOAT16 = {"T": "bfloat16"}


class Team:
    """Installations that share one address; the one that is ``at`` work is that of the process."""

    def __init__(self, folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.root = folder, root
        self.address = str(folder / "team")
        self._monkeypatch = monkeypatch

    @property
    def place(self) -> SharedPlace:
        return SharedPlace(self.address)

    def home(self, who: str) -> Path:
        return self.folder / who

    def at(self, who: str) -> None:
        self._monkeypatch.setenv("TILEGYM_DB_HOME", str(self.home(who)))

    def measure(self, who: str, *traces: Trace) -> None:
        """As measured by an installation."""
        path = self.folder / f"{who}-{traces[0].trace_id}.jsonl"
        path.write_bytes(b"".join(signed_line(self.home(who), trace.to_json()) for trace in traces))
        with open_store(self.home(who), catalog=Catalog((self.root,))) as store:
            ingest(store, [path])

    def share(self, who: str, *traces: Trace, gpu: str = GPU) -> list[str]:
        """Measured and promoted, and its table added."""
        if traces:
            self.measure(who, *traces)
        with open_store(self.home(who), catalog=Catalog((self.root,))) as store:
            return share_tables(store, self.place, gpu)

    def sync(self, who: str, *, trust: bool = False) -> FetchedTables:
        return fetch_tables(self.home(who), self.place, trust=trust)

    def served(
        self, who: str, *, trust: bool = False, gpu: str = GPU, definition: str = "scale"
    ) -> dict[int, list[str]]:
        """Return M -> the candidates that an installation may serve, by latency, with the signer of each."""
        self.at(who)
        table: ResolverTable | None = load_table(gpu, trust=trust)
        if table is None:
            return {}
        entries = table.believed_entries(Catalog((self.root,)).definition(definition), BFLOAT16)
        return {entry.call.axes["M"]: [f"{one.solution} {one.origin}" for one in entry.candidates] for entry in entries}


@pytest.fixture(params=["folder", "s3"])
def anywhere(request, tmp_path, root, monkeypatch) -> Team:
    """A team that shares a folder, and one that shares a bucket."""
    team = Team(tmp_path, root, monkeypatch)
    if request.param == "s3":
        team.address = request.getfixturevalue("s3")
    return team


@pytest.fixture
def team(tmp_path, root, monkeypatch) -> Team:
    return Team(tmp_path, root, monkeypatch)


@pytest.fixture
def on(trace) -> Callable[..., Trace]:
    """A promoted pass on the GPU of these tests."""
    return lambda *given, **changes: trace(*given, **{"gpu": GPU, "speedup": 2.0, **changes})


def files_of(team: Team, part: str) -> list[Path]:
    """The files of the shared folder whose path has a part in it."""
    return sorted(path for path in Path(team.address, "_tables").rglob("*.json*") if part in path.as_posix())


def rewritten(team: Team, change: Callable[[dict[str, Any]], None]) -> None:
    """Replace the only lock by an edited one under the name that its content has, as anyone with access could."""
    (path,) = files_of(team, "/by=")
    lock = json.loads(path.read_text())
    change(lock)
    content = json.dumps(lock).encode()
    path.unlink()
    path.with_name(f"{path.name.partition('-')[0]}-{sha256(content)}.json").write_bytes(content)


# -- what a team does -------------------------------------------------------------------------------------------------


def test_table_of_another_installation_serves_once_it_is_trusted(anywhere, on):
    anywhere.share("ada", on(m=1, latency_us=2.0), on(latency_us=9.0), on("shift"))
    found = anywhere.sync("bob")
    assert (found.tables, found.new, found.waiting, found.problems) == (1, 1, 1, [])
    assert "foreign, and served by nothing here" in found.notes(anywhere.address)[0]
    assert anywhere.served("bob") == {}
    assert anywhere.served("bob", trust=True) == {1: ["scale_triton foreign"], 4096: ["scale_triton foreign"]}
    assert anywhere.served("bob") == {}  # that was for one call
    again = anywhere.sync("bob", trust=True)
    assert (again.tables, again.new, again.waiting, again.notes("")) == (1, 0, 0, [])
    assert anywhere.served("bob") == {1: ["scale_triton foreign"], 4096: ["scale_triton foreign"]}
    assert anywhere.served("bob", definition="shift") == {4096: ["shift_triton foreign"]}


def test_an_installation_believes_what_it_signed_itself(anywhere, on):
    anywhere.share("ada", on())
    assert anywhere.served("ada") == {}  # 'publish --to' writes nothing here
    assert anywhere.sync("ada").waiting == 0
    assert anywhere.served("ada") == {4096: ["scale_triton local"]}


def test_the_same_table_is_written_once_and_each_set_of_it_once(anywhere, on):
    first = anywhere.share("ada", on(), on("shift"))
    assert len(first) == 3
    assert anywhere.share("ada") == []
    second = anywhere.share("ada", on("shift", m=1))
    assert [name.rpartition("/")[0] for name in second[:1]] == [f"_tables/gpu={GPU}/sets/activation/shift"]
    assert len(second) == 2  # the set that is new, and the lock
    assert anywhere.sync("bob", trust=True).tables == 1
    assert set(anywhere.served("bob", definition="shift")) == {1, 4096}


def test_two_that_write_at_once_are_both_there(anywhere, on):
    anywhere.measure("ada", on(m=1), on("shift"))
    anywhere.measure("bob", on(kind="tilelang", latency_us=5.0), on(kind="tilelang", m=1, latency_us=5.0))
    together = [threading.Thread(target=anywhere.share, args=(who,)) for who in ("ada", "bob") for _ in range(2)]
    for one in together:
        one.start()
    for one in together:
        one.join()
    found = anywhere.sync("carl", trust=True)
    assert (found.tables, found.problems) == (2, [])
    both = ["scale_tilelang foreign", "scale_triton foreign"]
    assert anywhere.served("carl") == {1: both, 4096: ["scale_tilelang foreign"]}


def test_only_what_was_measured_here_is_in_a_table(team, on):
    team.share("ada", on(m=1))
    team.sync("bob", trust=True)
    team.share("bob", on())
    (path,) = files_of(team, f"by={tables_in(team.home('bob'))[0].writer}")
    assert list(json.loads(path.read_text())["files"]) == ["norm/scale.jsonl.gz"]
    team.share("carl", on(sandbox_level=1))
    assert len(files_of(team, "/by=")) == 2


def test_newer_untrusted_table_leaves_the_older_trusted_one(team, on):
    team.share("ada", on(m=1))
    team.sync("bob", trust=True)
    team.share("ada", on())
    assert team.sync("bob").waiting == 1
    assert set(team.served("bob")) == {1}
    assert set(team.served("bob", trust=True)) == {1, 4096}
    team.sync("bob", trust=True)
    assert set(team.served("bob")) == {1, 4096}
    assert len(tables_in(team.home("bob"))) == 1


def test_a_table_that_left_the_data_set_leaves_the_home_folder(team, on):
    team.share("ada", on())
    team.sync("bob", trust=True)
    (lock,) = files_of(team, "/by=")
    lock.unlink()
    assert team.sync("bob").tables == 0
    assert team.served("bob") == {}


# -- beside what is published -----------------------------------------------------------------------------------------


def test_it_adds_to_the_published_table_which_comes_first(team, on, trace):
    team.share("ada", on(m=1, latency_us=1.0), on(m=1, kind="tilelang", latency_us=3.0), on(latency_us=4.0))
    team.measure("bob", on(m=1, latency_us=2.0))
    team.at("bob")
    with open_store(team.home("bob"), catalog=Catalog((team.root,))) as store:
        publish(store, GPU, own=True)
    assert team.served("bob") == {1: ["scale_triton local"]}
    team.sync("bob", trust=True)
    served = {1: ["scale_triton local", "scale_tilelang foreign"], 4096: ["scale_triton foreign"]}
    assert team.served("bob") == served


def test_failure_in_one_table_takes_back_a_pass_in_another(team, on):
    team.share("ada", on(), on(m=1))
    passed, failed = on(), on(status="RUNTIME_ERROR")
    assert team.share("bob", passed, failed)
    team.sync("carl", trust=True)
    assert team.served("carl") == {}
    team.share("ada", on(m=1))
    team.sync("carl", trust=True)
    assert team.served("carl") == {1: ["scale_triton foreign"]}  # measured after the failure


def test_overruling_in_one_table_counts_in_all(team, on):
    team.share("ada", on(m=1))
    passed, failed = on(), on(status="INCORRECT_NUMERICAL")
    team.share("bob", passed, failed)
    team.share("ada", on(m=1))
    team.sync("carl", trust=True)
    assert team.served("carl") == {}  # also the pass measured after the wrong number
    with open_store(team.home("bob"), catalog=Catalog((team.root,))) as store:
        overrule(store, failed.trace_id, "the driver was replaced")
    team.share("bob")
    team.sync("carl", trust=True)
    assert set(team.served("carl")) == {1, 4096}


# -- what is not whole ------------------------------------------------------------------------------------------------


def test_writer_that_dies_at_any_moment_leaves_the_old_table(team, on, monkeypatch):
    team.share("ada", on(m=1), on("shift"))
    team.measure("ada", on(), on("shift", m=1))
    add = SharedPlace.add
    for moment in range(3):
        left = iter(range(moment))

        def dying(self, name, save, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return add(self, name, save)

        with monkeypatch.context() as patched:
            patched.setattr(SharedPlace, "add", dying)
            with pytest.raises(KeyboardInterrupt):
                team.share("ada")
        assert team.sync("bob", trust=True).problems == []
        assert set(team.served("bob")) == {1}
    team.share("ada")
    team.sync("bob", trust=True)
    assert set(team.served("bob")) == {1, 4096}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "is not what the lock says"),
        (lambda path: rewrite_lines(path, lambda text: text.replace("10.0", "11.0")), "is not what the lock says"),
        (lambda path: path.unlink(), "is not there"),
    ],
)
def test_incomplete_set_is_named_and_the_previous_table_counts(team, on, damage, reason):
    team.share("ada", on(m=1))
    before = set(files_of(team, "/sets/"))
    team.share("ada", on(m=1, latency_us=9.0), on())
    (new,) = set(files_of(team, "/sets/")) - before
    damage(new)
    found = team.sync("bob", trust=True)
    assert (found.tables, len(found.problems)) == (1, 1)
    assert reason in found.problems[0]
    assert set(team.served("bob")) == {1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda lock: lock.update(schema_version=2),
            "pip install --upgrade tilegym-db",
        ),
        (lambda lock: lock.update(gpu="h200"), "resolver table of l4"),
        (lambda lock: lock.update(files={"../../../x/evil.jsonl.gz": "0" * 64}), "'../../../x/evil.jsonl.gz'"),
        (lambda lock: lock.update(files={}), "resolver table"),
        (lambda lock: lock.update(published="tomorrow"), "when it was written"),
        (lambda lock: lock.pop("published"), "'published'"),
    ],
)
def test_bad_or_newer_lock_is_named_and_the_others_are_read(team, on, change, reason):
    team.share("ada", on(m=1))
    rewritten(team, change)
    team.share("bob", on())
    found = team.sync("carl", trust=True)
    assert found.tables == 1
    (problem,) = found.problems
    assert reason in problem
    assert set(team.served("carl")) == {4096}
    assert not (team.folder / "x").exists()


def test_a_lock_under_another_name_than_its_digest_was_changed(team, on):
    team.share("ada", on())
    (path,) = files_of(team, "/by=")
    path.write_text(path.read_text().replace('"sm_90"', '"sm_89"'))
    found = team.sync("bob", trust=True)
    assert found.tables == 0
    assert "it was changed after it was written" in found.problems[0]


def rewrite_lines(path: Path, edit: Callable[[str], str]) -> None:
    """Edit the lines of a packed file."""
    content = packed(edit(unpacked(path.read_bytes(), path).decode()).encode())
    assert content != path.read_bytes()
    path.write_bytes(content)


def with_set(team: Team, edit: Callable[[str], str]) -> None:
    """Edit the set of ``scale``, its name, the lock and its name, so that every digest fits again."""
    (path,) = files_of(team, "/sets/norm/scale")
    content = packed(edit(unpacked(path.read_bytes(), path).decode()).encode())
    path.with_name(f"{sha256(content)}.jsonl.gz").write_bytes(content)
    rewritten(team, lambda lock: lock["files"].update({"norm/scale.jsonl.gz": sha256(content)}))


def test_a_set_with_a_wrong_type_is_named(team, on):
    team.share("ada", on())
    with_set(team, lambda text: text.replace('"op_type":"norm"', '"op_type":4'))
    (problem,) = team.sync("bob", trust=True).problems
    assert "norm/scale.jsonl.gz" in problem
    assert "op_type" in problem


def test_edited_table_is_foreign_and_its_figures_are_judged(team, root, trace):
    """Make every digest fit: times below the physics floor of an H200, whose peaks ship, are not served."""
    path = root / "definitions" / "norm" / "scale.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cost": {"flops": "M*N", "bytes": "4*M*N"}}))
    team.share(
        "ada", trace(latency_us=50.0, speedup=2.0), trace(kind="tilelang", latency_us=60.0, speedup=2.0), gpu="h200"
    )
    with_set(team, lambda text: re.sub(r'"(latency|ci_low|ci_high)_us":(49|50)\.', r'"\1_us":0.05', text))
    team.sync("ada")
    assert team.served("ada", gpu="h200") == {}
    team.sync("bob", trust=True)
    assert team.served("bob", gpu="h200") == {4096: ["scale_tilelang foreign"]}


def test_errors_that_no_gate_lets_pass_are_not_served(team, on):
    team.share("ada", on(m=1))
    with_set(team, lambda text: text.replace('"rel_fro":0.001', '"rel_fro":0.5'))
    team.sync("bob", trust=True)
    assert team.served("bob") == {1: []}


def test_set_that_was_edited_here_is_skipped_and_fetched_again(team, on, caplog):
    team.share("ada", on())
    team.sync("bob", trust=True)
    (table,) = tables_in(team.home("bob"))
    path = table.snapshot.folder / "norm" / "scale.jsonl.gz"
    rewrite_lines(path, lambda text: text.replace("10.0", "11.0"))
    with caplog.at_level(logging.WARNING):
        assert team.served("bob") == {}
    assert "a table of a team is passed over" in caplog.text
    (check,) = check_shared_tables()
    assert check.state == "problem"
    assert "was changed after it was published" in check.detail
    assert team.sync("bob", trust=True).new == 1
    assert set(team.served("bob")) == {4096}


def test_trust_is_in_one_lock_of_one_installation(team, on):
    team.share("ada", on())
    team.sync("bob", trust=True)
    (table,) = tables_in(team.home("bob"))
    lock = table.snapshot.folder / LOCK_NAME
    lock.write_text(lock.read_text().replace('"sm_90"', '"sm_89"'))
    assert team.served("bob") == {}
    stranger = team.home("carl") / table.snapshot.folder.relative_to(team.home("bob"))
    stranger.mkdir(parents=True)
    for name in ("trusted", "source.json", LOCK_NAME):
        (stranger / name).write_bytes((table.snapshot.folder / name).read_bytes())
    assert [one.standing for one in tables_in(team.home("carl"))] == ["foreign"]


# -- messages for the user ---------------------------------------------------------------------------------------------


def test_explain_and_doctor_say_what_is_used_and_why_not(team, on):
    team.share("ada", on())
    team.sync("bob")
    team.at("bob")
    (told,) = shared_tables(GPU)
    assert (told["standing"], told["used"]) == ("foreign", False)
    assert told["why"].endswith(f"tilegym-db data sync {team.address} --tables --trust")
    (check,) = check_shared_tables()
    assert (check.state, check.fix) == (
        "missing",
        f"To use what you trust: tilegym-db data sync {team.address} --tables --trust",
    )
    (told,) = shared_tables(GPU, trust=True)
    assert told["used"]
    team.sync("bob", trust=True)
    (told,) = shared_tables(GPU)
    assert (told["standing"], told["used"], told["why"]) == ("trusted", True, "")
    (check,) = check_shared_tables()
    assert (check.state, check.detail) == ("ok", f"1 serve here: {GPU} from {team.address} (trusted)")
    assert shared_tables("h200") == []


@pytest.mark.turn("tilegym_db/store/sharing.py")  # its functions are tested above
def test_the_command_line_shares_a_table_and_brings_it(anywhere, on, capsys, monkeypatch):
    from tilegym_db.cli.app import app
    from tilegym_db.store.journal import Journal, read_journal

    path = next(iter(sorted((Path(__file__).parents[2] / "traces").glob("*/norm/rms_norm.jsonl.gz"))))
    with Journal("run-1", anywhere.home("ada")) as journal:
        for trace in read_journal(path).traces[:5]:
            changes = {"gpu": GPU, "run_id": "run-1", "trace_id": f"{trace.trace_id}-{GPU}"}
            journal.append(trace.model_copy(update=changes))
    anywhere.at("ada")
    assert app(["publish", "--gpu", GPU, "--to", anywhere.address]) == 0
    assert "added a resolver table of the kernels verified here, in 2 files" in capsys.readouterr().err
    anywhere.at("bob")
    assert app(["data", "sync", anywhere.address, "--tables"]) == 0
    told = capsys.readouterr()
    assert told.out == "1 resolver tables, 1 of them new here\n"
    assert "foreign, and served by nothing here" in told.err
    assert not (anywhere.home("bob") / "tilegym.duckdb").exists()
    assert app(["data", "sync", anywhere.address, "--trust", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["added"], told["tables"], told["new_tables"], told["waiting_tables"]) == (5, 1, 0, 0)
    table = load_table(GPU)
    assert table is not None
    assert {one.origin for entry in table for one in entry.candidates} == {"foreign"}


def test_decision_says_that_another_installation_measured_it(team, on):
    from tilegym_db.resolver.resolve import resolve

    team.share("ada", on(latency_us=9.0))
    team.sync("bob", trust=True)
    team.at("bob")
    found = resolve(
        "scale",
        axes={"M": 4096, "N": 4096},
        dtypes=BFLOAT16,
        scalars={"eps": 1e-5},
        gpu=GPU,
        catalog=Catalog((team.root,)),
    )
    assert found.solution.name == "scale_triton"
    assert found.evidence.reason.endswith("; another installation measured it, which is trusted here")
