"""How many calls of models a kernel answers: by model, stage and group of operators, from the shipped tables. Needs no GPU.

Asks the resolver for every kind of call of a list of models (tilegym_db/scaffold/model_calls.py). An answer is exact, or that of
a neighbour; else stock code runs because it was measured as faster, or because the call was not measured.

    python benchmarks/hit_rate.py --gpu h200 --gpu h100
    tilegym-db model plan --gpu h200 --goal 92                          # what to measure so that more are answered
    python benchmarks/hit_rate.py --gpu h200 --all --json hits.json     # every model of the list, 1 to 8 GPUs each
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from tilegym_db.catalog import Catalog
from tilegym_db.loop.coverage import ANSWERS, ask
from tilegym_db.published.table import load_table
from tilegym_db.resolver.decide import RULE, Rule
from tilegym_db.scaffold.model_calls import ASKED_STAGES, Question, known_models, questions


def shares(answers: Iterable[tuple[Question, str]], key: Callable[[Question], str]) -> dict[str, Counter[str]]:
    """Return the number of each answer, by a key of the question."""
    found: dict[str, Counter[str]] = {}
    for question, given in answers:
        found.setdefault(key(question), Counter())[given] += 1
    return found


def print_shares(title: str, counted: dict[str, Counter[str]]) -> None:
    """Print one line per key with the percentage of each answer."""
    print(f"\n{title:24} questions  kernel  " + "  ".join(f"{name:>13}" for name in ANSWERS))
    for key, counts in counted.items():
        total = sum(counts.values())
        kernel = counts["exact"] + counts["neighbour"]
        columns = "  ".join(f"{100 * counts[name] / total:12.1f}%" for name in ANSWERS)
        print(f"{key:24} {total:9}  {100 * kernel / total:5.1f}%  {columns}")


def main() -> None:
    """Ask, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="append", help="slug or family; may be repeated; default: h200 and h100")
    parser.add_argument(
        "--all", action="store_true", help="every model of the list, at every stage, on 1, 2, 4 and 8 GPUs"
    )
    parser.add_argument("--rule", choices=get_args(Rule), default=RULE, help="for calls that were not measured")
    parser.add_argument("--json", type=Path, help="file for every question with its answer and reason")
    options = parser.parse_args()
    if options.all:
        asked = questions(known_models())
    else:
        asked = questions((one for one in known_models() if one.get("asked")), ASKED_STAGES, (1,))
    catalog, rows = Catalog.default(), []
    for gpu in options.gpu or ["h200", "h100"]:
        answers, table = [], load_table(gpu)
        for question in asked:
            given, reason = ask(question, gpu, catalog, table, options.rule)
            answers.append((question, given))
            rows.append({"gpu": gpu, "model": question.model, "parallel": question.parallel, "stage": str(question.stage),
                         "group": question.group, "definition": question.definition, "axes": dict(question.axes),
                         "answer": given, "reason": reason})  # fmt: skip
        print(f"\n== {gpu}: {len(asked)} questions ==")
        print_shares("all", shares(answers, lambda question: "all"))
        for title, key in (("group", "group"), ("stage", "stage"), ("model", "model")):
            print_shares(title, shares(answers, lambda question, key=key: str(getattr(question, key))))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
