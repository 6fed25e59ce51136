from __future__ import annotations

import json
import math

import pytest

from tilegym_db import files

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "rms_norm_eps": 1e-5, "torch_dtype": "float32"}
REFERENCE = (
    "# Source: https://example.org/model.py#L1\n"
    "def run(x, weight):\n    return (x.float() * weight.float()).to(x.dtype)\n"
)
INDEPENDENT = "def run(x, weight):\n    return weight.expand(x.shape).float().mul(x.float()).to(x.dtype)\n"
ERRORS = [
    {"find": "* weight.float()", "replace": "", "why": "the weight is forgotten"},
    {"find": "x.float()", "replace": "x.float().abs()", "why": "the sign is lost"},
    {"find": "weight.float()", "replace": "weight.float().flip(0)", "why": "the weights in reverse"},
]


@pytest.fixture
def draft(cli, checkout, tmp_path, monkeypatch):
    """A draft with its maths put in, in the current folder."""
    monkeypatch.chdir(tmp_path)
    result = cli("new", "definition", "my_scale", "--description", "Every row times a weight.")
    assert result.code == 0, result.err
    folder = tmp_path / "my_scale"
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "independent.py").write_text(INDEPENDENT)
    (folder / "planted_errors.json").write_text(json.dumps(ERRORS))
    return folder


def test_draft_becomes_a_definition_with_sizes_and_a_clean_check(cli, draft):
    assert cli("check", "my_scale/").out == ""
    assert cli("add-definition", draft).code == 0
    missing = cli("check", "my_scale")
    assert missing.out.count("\n") == 1
    assert "no solution provides its stock code" in missing.out
    assert "Try: tilegym-db new solution my_scale --stock" in missing.out
    assert cli("new", "solution", "my_scale", "--stock").code == 0
    result = cli("check", "my_scale")
    assert (result.code, result.out) == (0, "")
    assert "Next: tilegym-db bench my_scale" in result.err


def test_a_program_reads_what_was_written(cli, draft, tmp_path):
    assert cli("new", "definition", "other", "--json").json() == {"written": [f"other/{name}" for name in FILES]}
    assert cli("add-definition", draft).code == 0
    stock = cli("new", "solution", "my_scale", "--stock", "--json").json()
    assert (stock["solution"], stock["definition"]) == ("my_scale_stock", "my_scale")
    written = cli("new", "solution", "my_scale", "-l", "triton", "--json").json()["written"]
    assert written == ["my_scale_triton/kernel.py", "my_scale_triton/solution.json"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ("--from-config", "config.json", "--axes", "N=64", "--json")
    assert cli("new", "workload", "my_scale", *options).json()["written"] == ["my_scale-gpt2.jsonl"]


FILES = ("definition.json", "reference.py", "independent.py", "planted_errors.json", "workloads.jsonl")


def test_folder_of_a_draft_is_checked_by_its_bare_name(cli, draft):
    (draft / "independent.py").unlink()
    found = [cli("check", name) for name in ("my_scale", "my_scale/")]
    assert [result.code for result in found] == [1, 1]
    assert found[0].out == found[1].out
    assert "independent.py" in found[0].out


def test_every_fault_of_a_draft_is_in_one_list(cli, draft):
    record = json.loads((draft / "definition.json").read_text())
    record["cost"]["flops"] = "2 * Z"
    record["inputs"]["weight"]["shape"] = ["K"]
    record["independent_axes"] = ["Q"]
    record["colour"] = "red"
    (draft / "definition.json").write_text(json.dumps(record))
    result = cli("check", "my_scale/")
    assert result.code == 1
    assert "unknown key 'colour'" in result.out
    del record["colour"]
    (draft / "definition.json").write_text(json.dumps(record))
    (draft / "reference.py").write_text("def run(x, weights):\n    return x\n")
    result = cli("check", "my_scale/", "--json")
    found = "\n".join(result.json())
    for part in (
        "inputs.weight uses undeclared axis 'K'",
        "cost.flops uses undeclared axis 'Z'",
        "independent_axes names the undeclared axis 'Q'",
        "reference: run(x, weights) must take the inputs in order",
        "planted_errors[0]",
        "planted_errors[1]",
        "planted_errors[2]",
    ):
        assert part in found
    assert len(result.json()) == 7


def test_failing_part_is_named_by_kind_and_hides_nothing_else(cli, draft):
    broken = [
        {"find": "x.float()", "replace": "x.float(7)", "why": "raises"},
        {"find": "x.float()", "replace": "flaot(x)", "why": "misspelt"},
        {"find": "weight.float()", "replace": "weight.float() * 1.0", "why": "changes nothing"},
    ]
    (draft / "planted_errors.json").write_text(json.dumps(broken))
    (draft / "independent.py").write_text("def run(x, weight):\n    return x.view(7, 7)\n")
    (draft / "workloads.jsonl").write_text((draft / "workloads.jsonl").read_text().splitlines()[0] + "\n")
    found = cli("check", "my_scale/").out
    lines = found.splitlines()
    assert len(lines) == 4
    assert "planted error (raises): does not run, so it proves nothing" in found
    assert "TypeError" in found
    assert "planted error (misspelt): does not run" in found
    assert "'flaot'" in found
    assert "planted error (changes nothing): is accepted by the comparison" in found
    assert "independent formulation: does not run" in found
    assert "line 2:" in found
    assert "alternative formulation" not in found


def test_text_that_the_scan_refuses_is_named_by_its_file(cli, draft):
    (draft / "independent.py").write_text("def run(x, weight):\n    return open(x)\n")
    found = cli("check", "my_scale/").out
    assert "independent.py:2: hard: reads-files: uses open; remove it" in found


def test_a_draft_that_is_not_touched_lists_its_open_places(cli, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli("new", "definition", "my_scale")
    result = cli("check", "my_scale/")
    assert result.code == 1
    assert all("TODO" in line for line in result.out.splitlines())


def test_nothing_that_exists_is_written_over(cli, draft, snapshot, tmp_path):
    before = snapshot(tmp_path)
    result = cli("new", "definition", "my_scale")
    assert (result.code, result.cause) == (1, "folder_exists")
    assert "my_scale" in result.err
    assert snapshot(tmp_path) == before


def test_an_operator_that_exists_is_not_drafted_again(cli, row_scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("new", "definition", "row_scale")
    assert (result.code, result.cause) == (1, "definition_exists")
    assert "row_scale.json" in result.err
    assert not (tmp_path / "row_scale").exists()


def test_a_draft_of_a_kernel_is_added_once_it_is_finished(cli, row_scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for language in ("python", "triton", "tilelang", "cutile"):
        folder = tmp_path / f"row_scale_{language}"
        made = cli("new", "solution", "row_scale", "-l", language)
        assert made.code == 0, made.err
        refused = cli("add-solution", folder)
        assert (refused.code, refused.cause) == (1, "draft_unfinished")
        for file in folder.iterdir():
            file.write_text(file.read_text().replace("TODO: ", ""))
        kernel = folder / "kernel.py"
        kernel.write_text(f"{kernel.read_text()}# TODO: a remark of its author\n")
        added = cli("add-solution", folder)
        assert added.code == 0, added.err
    again = cli("new", "solution", "row_scale", "-l", "triton")
    assert "row_scale_triton_2" in again.out


def test_stock_code_is_added_once_and_is_not_a_language(cli, row_scale):
    result = cli("new", "solution", "row_scale", "--stock")
    assert result.code == 1
    assert "'row_scale_stock'" in result.err
    assert cli("new", "solution", "row_scale", "--stock", "-l", "triton").code == 2
    assert cli("new", "solution", "row_scale").code == 2
    assert cli("new", "solution", "row_scal", "-l", "triton").code == 2


@pytest.fixture
def config(tmp_path, write_json):
    return write_json(CONFIG, "config.json")


def test_workloads_of_a_config_are_written_and_can_be_added(cli, home, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("new", "workload", "rms_norm", "--from-config", config, "--tokens", "1,16")
    assert result.code == 0, result.err
    assert "rms_norm-gpt2.jsonl" in result.out
    lines = [json.loads(line) for line in (tmp_path / "rms_norm-gpt2.jsonl").read_text().splitlines()]
    assert [line["axes"] for line in lines] == [{"M": 1, "N": 64}, {"M": 16, "N": 64}]
    assert (
        cli("new", "workload", "rms_norm", "--from-config", config, "--tokens", "1,16").code == 1
    )  # never written over


def test_workloads_of_a_config_can_go_straight_into_the_catalog(cli, row_scale, config):
    options = ("--axes", "M=4,N=16", "--scalar", "factor=0.5", "--add")
    result = cli("new", "workload", "row_scale", "--from-config", config, *options)
    assert result.code == 0, result.err
    assert "added 1 of 1 workloads" in result.err


def test_what_a_config_cannot_say_is_named(cli, row_scale, config):
    result = cli("new", "workload", "row_scale", "--from-config", config)
    assert result.code == 1
    assert "NOT MAPPED" in result.out
    assert result.cause == "workload_missing"
    assert "--axes or --scalar (M, N, factor)" in result.err


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("hidden_size", 0, "hidden_size"),
        ("hidden_size", "x", '"x"'),
        ("rms_norm_eps", math.nan, "nan"),
        ("rms_norm_eps", "1e-5", "'eps'"),
    ],
)  # fmt: skip
def test_invalid_number_of_a_config_is_named_in_one_line(key, value, fact, cli, home, write_json, tmp_path):
    path = write_json({"model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-5} | {key: value}, "config.json")
    result = cli("new", "workload", "rms_norm", "--from-config", path, "--output", tmp_path / "out.jsonl")
    assert (result.code, result.err.count("\n"), fact in result.err) == (2, 1, True)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("tokens", ["", "a", "1,,2", "-1", "1.5"])
def test_counts_of_tokens_are_whole_numbers(cli, home, config, tokens):
    result = cli("new", "workload", "rms_norm", "--from-config", config, "--tokens", tokens)
    assert (result.code, result.cause) == (2, "tokens_invalid")


@pytest.mark.parametrize("shape", ["x[0]", "x[-1]", "x[M, 0]", "x[\N{ARABIC-INDIC DIGIT FOUR}]", "x[+]"])
def test_invalid_size_is_refused(cli, checkout, tmp_path, monkeypatch, shape):
    monkeypatch.chdir(tmp_path)
    result = cli("new", "definition", "my_scale", "--inputs", shape)
    assert result.code == 2
    assert "--inputs: " in result.err
    assert not (tmp_path / "my_scale").exists()


def test_a_draft_appears_whole_or_not_at_all(cli, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = []

    def fails_on_the_third(path, content, mode=None):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        write(path, content, mode)

    write = files._write_synced
    monkeypatch.setattr(files, "_write_synced", fails_on_the_third)
    result = cli("new", "definition", "my_scale")
    assert result.code == 1
    assert "No space left on device" in result.err
    assert list(tmp_path.glob("*scale*")) == list(tmp_path.glob(".tilegym-db-*")) == []


def test_an_empty_folder_is_filled_and_it_may_be_the_working_one(cli, checkout, tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert cli("new", "definition", "my_scale", "-o", ".").code == 0
    assert len(list(folder.iterdir())) == 5


def test_an_argument_that_is_no_text_writes_nothing(cli, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("new", "definition", "my_scale", "--description", "caf\udce9")
    assert result.code in (1, 2)
    assert "Traceback" not in result.err
    assert not (tmp_path / "my_scale").exists()


@pytest.mark.parametrize(
    ("words", "cause", "fact"),
    [
        (("definition", ""), "name_invalid", "NAME ''"),
        (("definition", "Foo"), "name_invalid", "NAME 'Foo'"),
        (("definition", "foo", "--description", "a\nb"), "description_invalid", "--description"),
        (("solution", "row_scale", "-l", "triton", "--name", ""), "name_invalid", "--name ''"),
    ],
)
def test_name_that_no_record_may_have_is_refused_before_writing(words, cause, fact, cli, row_scale, tmp_path):
    result = cli("new", *words)
    assert (result.code, result.cause) == (2, cause)
    assert fact in " ".join(result.err.split())


@pytest.mark.parametrize("target", [("--output", "workloads.jsonl"), ("--add",)])
def test_scalar_that_its_name_excludes_is_refused_with_its_name(cli, home, config, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    result = cli("new", "workload", "rms_norm", "--from-config", config, "--scalar", "eps=-1", *target)
    assert result.code == 1
    assert result.cause == "workload_missing"
    assert "inputs.eps: -1" in result.err
    assert not list(tmp_path.glob("*.jsonl"))
    assert not list(home.rglob("rms_norm.jsonl"))


def test_a_name_of_a_model_with_a_slash_names_no_other_folder(cli, home, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("new", "workload", "rms_norm", "--from-config", config, "--model", "../org/model")
    assert (result.code, (tmp_path / "rms_norm-org-model.jsonl").is_file()) == (0, True)
    assert "model:../org/model" in (tmp_path / "rms_norm-org-model.jsonl").read_text()


@pytest.mark.parametrize("words", [("definition", "mine"), ("solution", "rms_norm", "-l", "python")])
def test_a_dangling_link_is_named_as_what_is_in_the_way(words, cli, home, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    result = cli("new", *words, "--output", tmp_path / "link")
    assert (result.code, result.cause) == (1, "folder_exists")
    assert str(tmp_path / "link") in result.err
    assert (tmp_path / "link").is_symlink()


def test_a_draft_of_an_operator_is_added_once_it_is_finished(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("new", "definition", "twice", "--inputs", "x[M, N]", "--outputs", "out[M, N]").code == 0
    folder = tmp_path / "twice"
    refused = cli("add-definition", folder)
    assert (refused.code, refused.cause) == (1, "draft_unfinished")
    for file in folder.iterdir():
        text = file.read_text()
        file.write_text("\n".join(line.replace("TODO", "Done") for line in text.splitlines()) + "\n")
    (folder / "independent.py").write_text("# The same, with a remark.\n" + (folder / "reference.py").read_text())
    copied = cli("add-definition", folder)
    assert (copied.code, copied.cause) == (1, "independent_copied")
    assert "independent" in cli("check", folder).err + cli("check", folder).out
    renamed = (
        (folder / "reference.py")
        .read_text()
        .replace("wide", "y")
        .replace("out =", "z =")
        .replace("return out", "return z")
    )
    (folder / "independent.py").write_text(renamed)
    copied = cli("add-definition", folder)
    assert (copied.code, copied.cause) == (1, "independent_copied")


def test_points_of_a_model_are_written_with_their_cost(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5, **sizes}))
    result = cli("new", "workload", "--from-config", "config.json", "--parallel", "1", "--json")
    content = json.loads(result.out)
    lines = (tmp_path / "workloads-models.jsonl").read_text().splitlines()
    assert len(lines) == content["points"] > 0
    assert content["gpu_seconds"] > content["points"]
    assert {json.loads(line)["tags"][0] for line in lines} == {"model:llama"}
