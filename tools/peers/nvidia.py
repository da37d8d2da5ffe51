#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times other libraries' attention on an NVIDIA GPU for the shapes that kvleaf-bench lists, to be read beside it.

PyTorch's scaled_dot_product_attention reads contiguous K and V (FlashAttention-2 and cuDNN behind it), FlashInfer reads
pages through a shuffled table. Each is launched from a CUDA graph, so that Python's own time does not count, over as
many sets of K and V as keep the caches from serving them. Rows have the fields of kvleaf-bench's. A library that is not
installed, or refuses a shape, is said on stderr and left out.
"""
import argparse
import json
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shapes import SHAPES

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
ROTATED = 1 << 30  # bytes of K and V in all, well past the cache
SHORTEST = 5e-3    # seconds a run takes at least


def graph_of(launch, sets):
    """A CUDA graph of one launch a set."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for item in range(sets):
            launch(item)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in range(sets):
            launch(item)
    return graph


def time_runs(launch, sets, runs, rest):
    """Microseconds a launch, of each run."""
    graph = graph_of(launch, sets)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(replays):
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / replays

    run(2)
    replays = max(1, int(SHORTEST / run(3)) + 1)
    times = []
    for _ in range(runs):
        time.sleep(rest * 1e-3)
        times.append(run(replays) / sets * 1e6)
    return sorted(times)


def random(*shape, scale=1.0):
    return (torch.rand(*shape, device="cuda") * 2 - 1).mul_(scale).half()


class Work:
    """One shape: its queries and its sets of K and V, contiguous and in pages."""

    def __init__(self, bench, batch, context, q_len):
        self.bench, self.batch, self.context, self.q_len = bench, batch, context, q_len
        size = 2 * batch * context * KV_HEADS * DIM * 2
        self.sets = 2 if bench == "prefill" else min(32, max(1, -(-ROTATED // size)))
        self.q = random(batch, HEADS, q_len, DIM, scale=3.46)
        self.rows = self.q.transpose(1, 2).reshape(batch * q_len, HEADS, DIM).contiguous()
        shape = (batch, KV_HEADS, context, DIM)
        self.kv = [(random(*shape, scale=3.46), random(*shape, scale=1.5)) for _ in range(self.sets)]

    def measures(self, median_us):
        if self.bench == "decode":
            size = 2 * self.batch * self.context * KV_HEADS * DIM * 2
            return {"gb_per_s": size / median_us / 1e3}
        seen = sum(row + 1 + self.context - self.q_len for row in range(self.q_len))
        return {"gflop_per_s": 4.0 * self.batch * seen * HEADS * DIM / median_us / 1e3}

    def reference(self):
        """The right output of the first set's first sequence, in float32."""
        k, v = (x[0].float().repeat_interleave(HEADS // KV_HEADS, 0) for x in self.kv[0])
        limit = torch.arange(self.q_len, device="cuda") + self.context - self.q_len
        rows = slice(max(0, self.q_len - 64), self.q_len)
        scores = self.q[0, :, rows].float() @ k.transpose(1, 2) / DIM**0.5
        hidden = torch.arange(self.context, device="cuda")[None, :] > limit[rows, None]
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def check(work, out, name):
    """Compares the last rows of the first sequence; out is [batch * q_len, heads, dim]."""
    expected = work.reference()
    actual = out[work.q_len - len(expected):work.q_len].float()
    error = float((actual - expected).norm() / expected.norm())
    if not error < 2e-3:
        raise RuntimeError(f"{name} is wrong: error {error:.2g}")


def sdpa(backend):
    def prepare(work):
        causal = work.q_len > 1
        if causal and work.q_len != work.context:
            raise RuntimeError("its causal mask is aligned to the top left")

        def launch(item):
            k, v = work.kv[item]
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(work.q, k, v, is_causal=causal,
                                                                        enable_gqa=True)

        check(work, launch(0).transpose(1, 2).reshape(-1, HEADS, DIM), "sdpa")
        return launch
    return prepare


def pages(work):
    """The sets in pages [page, KV head, token, dim] at shuffled places, and their table."""
    columns = work.context // PAGE
    order = torch.randperm(work.batch * columns, device="cuda").int()
    out = []
    for pair in work.kv:
        both = []
        for x in pair:
            x = x.view(work.batch, KV_HEADS, columns, PAGE, DIM).transpose(1, 2).reshape(-1, KV_HEADS, PAGE, DIM)
            paged = torch.empty_like(x)
            paged[order.long()] = x
            both.append(paged)
        out.append(tuple(both))
    indptr = torch.arange(work.batch + 1, device="cuda", dtype=torch.int32) * columns
    last = torch.full((work.batch,), PAGE, device="cuda", dtype=torch.int32)
    return out, indptr, order, last


def flashinfer(backend):
    def prepare(work):
        import flashinfer as peer

        kv, indptr, order, last = pages(work)
        work.kv = work.kv[:1]  # the copies in pages are enough
        space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        if work.bench == "decode":
            wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=backend == "tensor cores")
            wrapper.plan(indptr, order, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16,
                         kv_data_type=torch.float16)
        else:
            wrapper = peer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend=backend)
            rows = torch.arange(work.batch + 1, device="cuda", dtype=torch.int32) * work.q_len
            wrapper.plan(rows, indptr, order, last, HEADS, KV_HEADS, DIM, PAGE, causal=True,
                         q_data_type=torch.float16, kv_data_type=torch.float16)

        def launch(item):
            return wrapper.run(work.rows, kv[item])

        check(work, launch(0), "flashinfer")
        return launch
    return prepare


PEERS = [
    ("PyTorch SDPA, FlashAttention-2, contiguous", ("decode", "prefill"), sdpa(SDPBackend.FLASH_ATTENTION)),
    ("PyTorch SDPA, cuDNN, contiguous", ("decode", "prefill"), sdpa(SDPBackend.CUDNN_ATTENTION)),
    ("FlashInfer, paged, tensor cores", ("decode",), flashinfer("tensor cores")),
    ("FlashInfer, paged, FA3", ("prefill",), flashinfer("fa3")),
    ("FlashInfer, paged, FA2", ("prefill",), flashinfer("fa2")),
]


def run(arguments, bench, batch, context, q_len):
    for name, benches, prepare in PEERS:
        if bench not in benches or arguments.peer.lower() not in name.lower():
            continue
        work = Work(bench, batch, context, q_len)
        try:
            times = time_runs(prepare(work), work.sets, arguments.runs, arguments.rest)
        except Exception as error:  # a peer that fails must not hide the others
            print(f"{name}, {bench} {batch} x {context}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        row = {"bench": bench, "peer": name, "device": torch.cuda.get_device_name(), "batch": batch,
               "context": context, "q_len": q_len, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM,
               "kv_dtype": "f16", "median_us": statistics.median(times), "best_us": times[0], "runs": len(times)}
        row.update(work.measures(row["median_us"]))
        print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", choices=["decode", "prefill"])
    parser.add_argument("--peer", default="", help="only peers whose name has this in it")
    parser.add_argument("--runs", type=int, default=50, help="timed runs (50)")
    parser.add_argument("--rest", type=int, default=0, metavar="MS", help="idle time before each run (0)")
    arguments = parser.parse_args()
    for shape in SHAPES[arguments.bench]:
        run(arguments, arguments.bench, *shape)


if __name__ == "__main__":
    main()
