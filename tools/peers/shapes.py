# SPDX-License-Identifier: Apache-2.0
"""The shapes that peers are measured on: (batch, context, q_len), with 32 query and 8 KV heads of 128, f16."""

SHAPES = {
    "decode": [(1, 4096, 1), (1, 32768, 1), (16, 4096, 1), (64, 4096, 1), (128, 2048, 1), (8, 32768, 1)],
    "prefill": [(1, 2048, 2048), (1, 8192, 8192), (4, 4096, 4096), (16, 1024, 1024), (8, 16896, 512)],
}
