/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_PLAN_H
#define KVLEAF_PLAN_H
/* The tables of a step as host and kernels both read them: sections of one int array ("meta"), each found by an offset
 * in ints that is a kernel argument. Constants only, so that C and OpenCL C share the file. */

/* Before the sections, in a cache line of their own: the two counters of the queue that kernels take work from, which
 * they find and leave at zero. Those of a step run one after the other, so that decode and prefill have it in turn. */
#define QUEUE_INTS 32

/* A query row of the decode family. */
#define ROW_INTS 6
#define ROW_Q_TOKEN 0       /* row of q, out and lse */
#define ROW_VISIBLE 1       /* keys the row sees: positions 0 .. visible-1; may be <= 0 */
#define ROW_TABLE 2         /* paged: entry of the block table where its sequence starts; contiguous: its first token */
#define ROW_PARTIAL 3       /* its first partial; its run i is partial ROW_PARTIAL + i; a row has one at least */
#define ROW_FIRST 4         /* with a window: the first key the row sees; may be negative */
#define ROW_RUN 5           /* splits of its runs, a power of two: 1 where the variant takes none */

/* A piece of work of the decode family. Splits lie at multiples of split_tokens; a row's split 0 is the one that its
 * first key lies in. */
#define SPLIT_INTS 5
#define SPLIT_ROW 0
#define SPLIT_INDEX 1
#define SPLIT_ROWS 2        /* rows from SPLIT_ROW on that have the split's keys in the same blocks; 1 where the variant
                               takes no more, which then reads no further */
#define SPLIT_KV_HEAD 3     /* its first KV head */
#define SPLIT_KV_HEADS 4

/* The same for a kernel that folds neighbouring splits itself: run r covers splits r * RUN_SPLITS .. + RUN_SPLITS - 1
 * of the row. The row's fields are repeated, so that a work-group has all of its task in one read. */
#define RUN_INTS 8
#define RUN_ROW 0
#define RUN_INDEX 1
#define RUN_Q_TOKEN 2
#define RUN_VISIBLE 3
#define RUN_TABLE 4
#define RUN_PARTIAL 5
#define RUN_FIRST 6
#define RUN_SPLITS 7        /* the row's ROW_RUN */

/* A sequence of the prefill family. */
#define ENTRY_INTS 8
#define ENTRY_Q_START 0     /* first row of q, out and lse */
#define ENTRY_Q_LEN 1
#define ENTRY_KV_LEN 2      /* keys, those of this step included */
#define ENTRY_TABLE 3       /* as ROW_TABLE */
#define ENTRY_MASK 4        /* 0 causal (bottom-right aligned), 1 none */
#define ENTRY_WINDOW 5      /* with a window: tokens a row sees, its own included (on each side with mask none) */

/* A tile of the prefill family: ITEM_QUERIES query rows from ITEM_QUERY of the entry times tile_heads query heads of
 * one KV head (fewer at the group's end). */
#define ITEM_INTS 5
#define ITEM_ENTRY 0
#define ITEM_QUERY 1
#define ITEM_KV_HEAD 2
#define ITEM_HEAD 3         /* first head within the group */
#define ITEM_QUERIES 4

/* A sequence of gather. */
#define GATHER_INTS 4
#define GATHER_KV_LEN 0
#define GATHER_TABLE 1
#define GATHER_OUT 2        /* first row of the packed output; ascending, so a row's sequence is found by bisection */

/* A changed entry of the device's block table. */
#define UPDATE_INTS 2
#define UPDATE_INDEX 0
#define UPDATE_BLOCK 1

/* Partials: partial p, head h at (p * num_heads + h) * PARTIAL_STRIDE(head_dim) floats: the unnormalised accumulator
 * [head_dim], then at PARTIAL_M the running maximum (log2 domain), at PARTIAL_L the sum. Empty: m = NEGATIVE, l = 0,
 * accumulator 0. */
#define PARTIAL_M(head_dim) (((head_dim) + 15) / 16 * 16)
#define PARTIAL_L(head_dim) (PARTIAL_M(head_dim) + 1)
#define PARTIAL_STRIDE(head_dim) (PARTIAL_M(head_dim) + 16)

/* For a kernel that folds its splits itself: counters of a row and KV head, one a warp, and partials behind the last
 * that it may read, whatever they hold. */
#define FOLD_COUNTERS 8
#define SPARE_PARTIALS 16

/* Values of -DQ_DTYPE, -DKV_DTYPE, -DOUT_DTYPE (enum kvleaf_dtype) and -DKV_LAYOUT (enum kvleaf_layout). */
#define DTYPE_F16 0
#define DTYPE_BF16 1
#define DTYPE_F32 2
#define LAYOUT_STRIDED 1
#define LAYOUT_ROWS 2
#define LAYOUT_CPU16 3
#define LAYOUT_DIM8 4
#define LAYOUT_SWIZZLE8 5
#endif
