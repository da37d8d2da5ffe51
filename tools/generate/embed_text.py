#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the kernel text into a C array: embed_text.py OUT.c IN.cl."""
import pathlib
import sys

out, source = sys.argv[1:]
data = pathlib.Path(source).read_bytes() + b"\0"
lines = ["/* Made by tools/generate/embed_text.py. */", "extern const char model_source[];",
         "const char model_source[] = {"]
lines += [",".join(map(str, data[at:at + 32])) + "," for at in range(0, len(data), 32)]
pathlib.Path(out).write_text("\n".join(lines + ["};", ""]))
