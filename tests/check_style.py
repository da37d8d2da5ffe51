#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""House style, as far as a script can see it: licence line, lengths, leftovers, kernel headings, links of the
documents, paths of one machine, clang-format where it is installed."""
import re
import shutil
import subprocess

import tree

CODE = (".c", ".h", ".cl", ".clh", ".py", ".sh")
C_FILES = (".c", ".h")
MAX_LINES = 600
MAX_COLUMNS = 120
LEFTOVER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}/~-])/(home|root|work|Users)/\w")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def code_problems(path, text):
    lines, found = text.split("\n"), []
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
        found.append(f"{path}:1: no SPDX line on top")
    if len(lines) - 1 > MAX_LINES:
        found.append(f"{path}: {len(lines) - 1} lines, at most {MAX_LINES}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            found.append(f"{path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}")
        if "\t" in line:
            found.append(f"{path}:{number}: a tab")
    if path.endswith(".cl") and path.startswith("cl_kernels/"):
        if not any(re.fullmatch(rf'#line \d+ "{re.escape(path)}"', line) for line in lines[:2]):
            found.append(f'{path}:1: does not begin with #line 1 "{path}"')
    return found


def text_problems(path, text):
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            found.append(f"{path}:{number}: white space at the end of the line")
        if LEFTOVER.search(line):
            found.append(f"{path}:{number}: work left undone: {line.strip()}")
        if MACHINE_PATH.search(line):
            found.append(f"{path}:{number}: a path of one machine: {line.strip()}")
    if not text.endswith("\n"):
        found.append(f"{path}: no newline at the end")
    return found


def document_problems(path, text):
    folder, found = (tree.ROOT / path).parent, []
    for target in LINK.findall(text):
        if "://" not in target and not target.startswith("mailto:") and not (folder / target).exists():
            found.append(f"{path}: links to {target}, which is not there")
    return found


def problems_of(path, text):
    found = text_problems(path, text)
    if path.endswith(CODE):
        found += code_problems(path, text)
    if path.endswith(".md"):
        found += document_problems(path, text)
    return found


def format_problems(paths):
    if not shutil.which("clang-format"):
        print("clang-format is not installed: formatting not checked")
        return []
    done = subprocess.run(["clang-format", "--dry-run", "-Werror", "--ferror-limit=1", *paths], cwd=tree.ROOT,
                          capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if ": error:" in line]


def checked(path):
    return path.endswith(CODE + (".md", ".build", ".txt", "meson_options.txt", ".ci/run")) and path != "LICENSE"


BROKEN = {
    "lib/a.c": "int a;\n",
    "lib/b.c": "/* SPDX-License-Identifier: Apache-2.0 */\n" + "int b;\n" * MAX_LINES,
    "lib/c.c": "/* SPDX-License-Identifier: Apache-2.0 */\n/* TO" "DO */\n",
    "lib/d.py": "# SPDX-License-Identifier: Apache-2.0\nd = 1 \n",
    "cl_kernels/cpu/e.cl": "// SPDX-License-Identifier: Apache-2.0\n",
    "f.md": "[gone](gone/nowhere.md)\n",
    "g.md": "see /" "home/me\n",
    "h.md": "no newline",
}
for broken_path, broken_text in BROKEN.items():
    tree.expect_complaint(problems_of(broken_path, broken_text), broken_path)
everything = tree.texts(checked)
all_problems = [p for path, text in everything.items() for p in problems_of(path, text)]
all_problems += format_problems([p for p in everything if p.endswith(".c")])
tree.finish(all_problems, f"style of {len(everything)} files")
