"""The table of commands: what there is, in which panel of the help, and one line on each."""

from __future__ import annotations

__all__ = ["COMMANDS"]

COMMANDS: dict[str, dict[str, str]] = {
    "Look": {
        "list": "List definitions, or with --solutions or --workloads what belongs to them.",
        "show": "Show a definition, a solution or one trace, whole.",
        "best": "Print the fastest verified solution per operator, shape and GPU.",
        "leaderboard": "Rank solutions per operator and GPU: shapes measured, shapes won, geometric means.",
        "compare": "Set two solutions of one operator side by side, wherever both are verified.",
        "explain": "Say which solution the resolver picks for a call, and why not each of the others.",
        "report": "Write one page of everything in the database, for a browser without a network.",
        "sql": "Run one read-only SQL statement over the database.",
    },
    "Author": {
        "new": "Write a draft of a definition, a solution or workloads, with the next command.",
        "add-definition": "Validate a definition, run its reference once on small inputs, and copy it into the catalog.",
        "add-solution": "Validate a solution and copy it into the catalog in one step.",
        "add-workload": "Validate workloads and append them to the catalog; all of them or none.",
        "check": "Check records, the lock, references, self-tests and sources.",
        "compile": "Compile every matching solution for a target, without a GPU.",
    },
    "Measure": {
        "bench": "Build, verify and time solutions; every result becomes a trace in the database.",
        "tune": "Find the fastest config of each solution per workload.",
        "promote": "Verify for good what passed a screen; only that is ever served.",
        "reproduce": "Verify one case of one solution and say what every gate found.",
        "sanitize": "Run kernels under compute-sanitizer at fuzz shapes; a finding is a failed verdict.",
        "profile": "Profile one call with Nsight Compute: bandwidth, occupancy, registers, stalls.",
        "regress": "Time every solution that changed since a revision, old and new interleaved.",
        "publish": "Write the traces and the resolver table of one GPU.",
        "ingest": "Bring journals into the database.",
        "sync": "Bring the traces of a data set that a team shares into the database.",
    },
    "The loop": {
        "task": "Make a task, print it for its author, hand a kernel in, see what became of it.",
        "auto-kernelize": "Have kernels written for what a model spends its time on, and keep what makes it better.",
        "recommend": "Say which promoted kernels would serve which calls of a model; nothing is applied.",
        "mcp": "Offer the loop's verbs to agents as tools of the Model Context Protocol, over stdio.",
    },
    "Models": {
        "fit": "Measure what could serve a model here, publish it for you, prove it and time the model.",
        "verify-model": "Compare each kernel of a patch with stock code on a model's own calls.",
        "model-bench": "Time a patched model against the same model as it is.",
    },
    "In and out": {
        "import": "Read a foreign data set into a folder of its own, as it is; nothing of it is run.",
        "export": "Write this database, or a data set that was imported, as files for other tools.",
        "compare-foreign": "Run imported solutions in the sandbox and set our verdicts beside theirs.",
    },
    "This machine": {
        "demo": "Show the whole of tilegym-db on this machine in a few minutes.",
        "doctor": "Say what works here and how to fix what does not.",
        "calibrate": "Measure the peaks of this GPU.",
        "version": "Print the version of tilegym-db and of the packages it works with.",
    },
}
"""Panel of the help -> command -> what it does, in the order in which the help shows them.

A command ``new-thing`` is the function ``command`` (or the Typer app ``app``) of the module ``cli/new_thing.py``.
"""
