"""Bundles the parts of D3 that the report draws with into one file. Needs Node.js and npm, which building the package does not.

python tools/bundle_d3.py            # writes tilegym_db/report/vendor/d3.min.js and d3.LICENSE
python tools/bundle_d3.py --check    # 1 where they are not what tools/d3/package-lock.json gives

Versions are in ``tools/d3/package.json``, what is called in ``tools/d3/parts.js``. After a change of versions:
``npm install --package-lock-only --ignore-scripts`` in ``tools/d3``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "d3"
VENDOR = Path(__file__).resolve().parents[1] / "tilegym_db" / "report" / "vendor"
BUILD = ("--bundle", "--minify", "--format=iife", "--global-name=d3", "--target=es2020", "--charset=utf8")
INSIDE = {"d3-array": "internmap"}
"""Packages whose code another one carries in its own published file."""


def main(arguments: list[str]) -> int:
    """Write the bundle and its licences, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a file differs")
    check = parser.parse_args(arguments).check
    if shutil.which("npm") is None:
        print("there is no npm. Try: apt-get install -y --no-install-recommends npm", file=sys.stderr)
        return 1
    differing = []
    for name, text in bundle().items():
        path = VENDOR / name
        if check and (not path.is_file() or path.read_text("utf-8") != text):
            differing.append(name)
        elif not check:
            path.write_text(text, "utf-8")
            print(f"{path}: {len(text.encode())} bytes")
    if differing:
        print(f"{', '.join(differing)} of {VENDOR} differ. Try: python tools/bundle_d3.py", file=sys.stderr)
    return 1 if differing else 0


def bundle() -> dict[str, str]:
    """Return the two files by name: the script, which begins with its licences, and the licences alone."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(shutil.copytree(SOURCE, folder, dirs_exist_ok=True))
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"], cwd=work, check=True)
        written = ("--outfile=d3.min.js", "--metafile=meta.json", "--log-level=warning")
        subprocess.run(["node_modules/.bin/esbuild", "parts.js", *BUILD, *written], cwd=work, check=True)
        script = (work / "d3.min.js").read_text("utf-8")
        licences = licences_of(work, json.loads((work / "meta.json").read_text("utf-8")))
    return {"d3.min.js": f"/*!\n{licences}*/\n{script}", "d3.LICENSE": licences}


def licences_of(work: Path, meta: dict[str, dict[str, dict[str, object]]]) -> str:
    """Return the packages with something in the bundle, under the text of licence that they share."""
    (output,) = meta["outputs"].values()
    inputs: dict[str, dict[str, int]] = output["inputs"]  # type: ignore[assignment]
    bundled = {path.split("/")[1] for path, part in inputs.items() if "/" in path and part["bytesInOutput"]}
    used = sorted(bundled | {inside for name, inside in INSIDE.items() if name in bundled})
    packages: dict[str, list[str]] = {}
    for name in used:
        folder = work / "node_modules" / name
        version = json.loads((folder / "package.json").read_text("utf-8"))["version"]
        packages.setdefault((folder / "LICENSE").read_text("utf-8").strip(), []).append(f"{name} {version}")
    return "\n".join(f"{', '.join(names)}\n\n{text}\n" for text, names in packages.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
