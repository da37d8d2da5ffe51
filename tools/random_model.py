#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a Llama-shaped model with random weights, to measure speed where no trained one is at hand.

    tools/random_model.py --out /tmp/random
    build/tools/kvleaf-bench serving --model /tmp/random

The default shape is SmolLM2-135M's. The same options and seed give the same bytes. Needs NumPy alone.
"""
import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np

DTYPES = {"f16": ("F16", "float16"), "f32": ("F32", "float32")}


def shapes(config):
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (hidden,)
        for projection, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield f"{name}self_attn.{projection}_proj.weight", shape
        yield name + "post_attention_layernorm.weight", (hidden,)
        yield name + "mlp.gate_proj.weight", (inner, hidden)
        yield name + "mlp.up_proj.weight", (inner, hidden)
        yield name + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def write_weights(path, config, dtype, seed):
    """Norms are 1; the rest is normal with a deviation that keeps activations near 1."""
    stored, numpy_type = DTYPES[dtype]
    size, header, at = np.dtype(numpy_type).itemsize, {}, 0
    for name, shape in shapes(config):
        end = at + int(np.prod(shape)) * size
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes(config):
            values = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
            file.write(values.astype(numpy_type).tobytes())
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    for option, value, what in (("layers", 30, "decoder layers"), ("hidden", 576, "width"), ("heads", 9, "query heads"),
                                ("kv-heads", 3, "KV heads; query heads must be a multiple"),
                                ("head-dim", 64, "elements of a head"), ("intermediate", 1536, "width inside the MLP"),
                                ("vocab", 49152, "tokens"), ("positions", 8192, "longest sequence"),
                                ("seed", 1, "of the weights")):
        parser.add_argument(f"--{option}", type=int, default=value, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="f16", help="of the weights (%(default)s)")
    args = parser.parse_args()
    small = [name for name, value in vars(args).items() if isinstance(value, int) and name != "seed" and value < 1]
    if small or args.seed < 0 or args.heads % max(args.kv_heads, 1) or args.head_dim % 2:
        parser.error("sizes must be 1 or more, heads a multiple of kv-heads, head-dim even, the seed 0 or more")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
              "hidden_size": args.hidden, "intermediate_size": args.intermediate, "num_hidden_layers": args.layers,
              "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim,
              "vocab_size": args.vocab, "max_position_embeddings": args.positions, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 0,
              "torch_dtype": DTYPES[args.dtype][1]}
    args.out.mkdir(parents=True, exist_ok=True)
    size = write_weights(args.out / "model.safetensors", config, args.dtype, args.seed)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {size / 1e6:.1f} MB of {args.dtype} weights", file=sys.stderr)


if __name__ == "__main__":
    main()
