# SPDX-License-Identifier: Apache-2.0
"""The project's files, and how a check over them ends."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77  # Meson's exit code of a skipped test
LEAVE_OUT = {"build", "models", "__pycache__"}


def files():
    """Paths of the project's files, relative to its root: those git knows or would take, else all that lie there."""
    git = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
                         capture_output=True, text=True, check=False)
    if git.returncode == 0:
        names = git.stdout.splitlines()
    else:
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    names = [n for n in names if not any(part in LEAVE_OUT or part.startswith("build-") for part in Path(n).parts[:-1])]
    return sorted(n for n in set(names) if (ROOT / n).is_file() and not n.startswith((".venv/", ".git/")))


def texts(wanted):
    """{path: text} of the project's files for which wanted(path)."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in files() if wanted(name)}


def expect_complaint(problems, what):
    """A check that finds nothing in a sample made to break it could never fail."""
    if not problems:
        print(f"the check itself is broken: it finds nothing wrong with {what}")
        sys.exit(1)


def finish(problems, looked_at):
    for problem in problems:
        print(problem)
    print(f"{looked_at}: {len(problems)} problems" if problems else f"{looked_at}: nothing wrong")
    sys.exit(1 if problems else 0)
