#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the kernel sources into one C table: embed.py OUT.c ROOT FILE... (names relative to ROOT)."""
import pathlib
import sys


def main() -> None:
    out, root, *names = sys.argv[1:]
    lines = ['/* Made by cl_kernels/embed.py. */', '#include "device/source.h"', '']
    table = []
    for index, name in enumerate(sorted(names)):
        data = (pathlib.Path(root) / name).read_bytes() + b"\0"
        lines.append(f"static const unsigned char file{index}[] = {{")
        lines += [",".join(map(str, data[at:at + 32])) + "," for at in range(0, len(data), 32)]
        lines.append("};")
        table.append(f'    {{"{name}", (const char *)file{index}, sizeof file{index} - 1}},')
    lines += ["", "const kvl_source kvl_sources[] = {", *table, "};",
              "const int kvl_source_count = sizeof kvl_sources / sizeof *kvl_sources;", ""]
    pathlib.Path(out).write_text("\n".join(lines))


main()
