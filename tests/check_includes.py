#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The dependency rule: a layer of lib/ includes only itself and the layers below it, base and blocks know no OpenCL,
and a kernel file includes only common/ and its own folder."""
import re

import tree

LAYERS = ["base", "blocks", "device", "pool", "attention", "cache", "snapshot"]
HOST_ONLY = {"base", "blocks"}
PUBLIC = {"status": "base", "blocks": "blocks", "device": "device", "pool": "pool", "attention": "attention",
          "cache": "cache", "snapshot": "snapshot", "kvleaf": "snapshot"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)


def layer_of(path):
    """The layer a file belongs to, or None."""
    parts = path.split("/")
    if path.startswith("include/kvleaf/"):
        return PUBLIC.get(parts[2].removesuffix(".h"))
    return parts[1] if parts[0] == "lib" and parts[1] in LAYERS else None


def target_layer(name):
    parts = name.split("/")
    if parts[0] == "kvleaf" and len(parts) == 2:
        return PUBLIC.get(parts[1].removesuffix(".h"), "an unknown public header")
    return parts[0] if parts[0] in LAYERS else None


def problems_of_layer(path, text):
    own, found = layer_of(path), []
    if own is None:
        return [f"{path}: belongs to no layer of {', '.join(LAYERS)}"]
    for _, name in INCLUDE.findall(text):
        other = target_layer(name)
        if name.startswith("CL/") and own in HOST_ONLY:
            found.append(f"{path}: includes {name}, but {own} is host only")
        if name.startswith((".", "tests/", "tools/")):
            found.append(f"{path}: includes {name}; write \"layer/file.h\" from lib/")
        if other and (other not in LAYERS or LAYERS.index(other) > LAYERS.index(own)):
            found.append(f"{path}: {own} includes {name} of {other}, a layer above it")
    return found


def problems_of_kernel(path, text):
    family, found = path.split("/")[1], []
    for _, name in INCLUDE.findall(text):
        if name.split("/")[0] not in ("common", family):
            found.append(f"{path}: includes {name}; a kernel may include common/ and {family}/")
    return found


def problems_of(sources):
    found = []
    for path, text in sources.items():
        kernel = path.startswith("cl_kernels/")
        found += problems_of_kernel(path, text) if kernel else problems_of_layer(path, text)
    return found


def wanted(path):
    return path.endswith((".c", ".h", ".cl", ".clh")) and path.startswith(("lib/", "include/", "cl_kernels/"))


BROKEN = {
    "lib/blocks/a.c": "#include <CL/cl.h>\n",
    "lib/blocks/b.c": "#include <kvleaf/pool.h>\n",
    "lib/pool/c.c": '#include "cache/cache.h"\n',
    "lib/shelf/d.c": "",
    "include/kvleaf/blocks.h": "#include <kvleaf/device.h>\n",
    "cl_kernels/cpu/e.cl": '#include "portable/decode.cl"\n',
}
for broken_path, broken_text in BROKEN.items():
    tree.expect_complaint(problems_of({broken_path: broken_text}), broken_path)
everything = tree.texts(wanted)
tree.finish(problems_of(everything), f"includes of {len(everything)} files")
