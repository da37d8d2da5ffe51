/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_ATTENTION_H
#define KVLEAF_ATTENTION_H

/* Attention kernels on the caller's own buffers, for an application with its own cache manager.
 *
 * An attention object is made for one geometry: it builds the programs and owns the staging and work buffers. A step is
 * one kvleaf_attention_plan (lengths, block tables, masks), then for every layer append and attend over that layer's
 * view. Nothing is allocated or built after creation. What the calls of one object enqueue must run in call order: use
 * one in-order queue, or chain them by events.
 *
 * Terms: total_q = query rows of the batch, packed sequence by sequence; the last query row of a causal sequence sees
 * all of its keys. */

#include <kvleaf/pool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvleaf_memory {
    KVLEAF_MEMORY_CL = 0 /* handle is a cl_mem; SVM and USM pointers are reserved */
} kvleaf_memory;

/* [tokens, heads, head_dim] in device memory; head_dim is contiguous. LSE: [total_q, num_heads] float32, token_stride
 * 0 = num_heads, head_stride 0 = 1. */
typedef struct kvleaf_tensor {
    kvleaf_memory memory;
    void *handle;    /* a cl_mem of the device's context */
    uint64_t offset; /* bytes to the first element; a multiple of the element size */
    kvleaf_dtype dtype;
    int64_t token_stride; /* elements; 0 = packed: heads * head_dim */
    int64_t head_stride;  /* elements; 0 = packed: head_dim */
} kvleaf_tensor;

/* Keys and values in the caller's buffers. Paged (block_size > 0): element (block, token, head, dim) of a STRIDED
 * view is at block * block_stride + token * token_stride + head * head_stride + dim, so NHD and HND are strides; of a
 * packed layout, tile (block, head) starts at block * block_stride + head * head_stride, strides 0 = packed; of
 * all but rows, offset and strides are multiples of 16 bytes. Contiguous (block_size 0): token t of the packed batch at
 * t * token_stride. */
typedef struct kvleaf_kv_view {
    uint32_t struct_size;
    kvleaf_tensor k, v;
    int64_t block_stride; /* elements, K and V alike; 0 = num_kv_heads * tile */
    kvleaf_layout layout; /* AUTO = STRIDED */
    int32_t num_blocks;   /* paged: blocks in the buffers */
} kvleaf_kv_view;

#define KVLEAF_KV_VIEW_INIT KVLEAF_INIT(kvleaf_kv_view)

/* A layer of a pool as a view: the pool's buffer twice, which is not retained. INVALID: layer out of range. */
KVLEAF_API kvleaf_status kvleaf_pool_view(const kvleaf_pool *pool, int32_t layer, kvleaf_kv_view *out);

/* Which kernel family computes a sequence's rows. Within one family results are bit for bit independent of the
 * batch. */
typedef enum kvleaf_family {
    KVLEAF_FAMILY_AUTO = 0, /* decode up to a row count fixed per device (1), prefill above */
    KVLEAF_FAMILY_PREFILL = 1,
    KVLEAF_FAMILY_DECODE = 2
} kvleaf_family;

typedef enum kvleaf_mask {
    KVLEAF_MASK_CAUSAL = 0, /* bottom-right aligned: key j is visible to row i iff j <= i + seqlen_k - seqlen_q */
    KVLEAF_MASK_NONE = 1
} kvleaf_mask;

/* Whether decode reads the leading blocks that several sequences of a batch share once for all of them (cascade
 * attention). Results are the same to the bit. */
typedef enum kvleaf_sharing {
    KVLEAF_SHARING_AUTO = 0, /* where it was measured to be faster */
    KVLEAF_SHARING_OFF = 1,
    KVLEAF_SHARING_ALWAYS = 2 /* wherever the decode variant can */
} kvleaf_sharing;

typedef struct kvleaf_attention kvleaf_attention;

typedef struct kvleaf_attention_params {
    uint32_t struct_size;
    int32_t num_heads; /* query heads, a multiple of num_kv_heads */
    int32_t num_kv_heads;
    int32_t head_dim_k; /* 1 .. 256 */
    int32_t head_dim_v; /* 0 = head_dim_k; another value is UNSUPPORTED */
    kvleaf_dtype q_dtype, kv_dtype, out_dtype;
    kvleaf_layout layout;    /* of the views: AUTO = STRIDED */
    int32_t block_size;      /* 1 .. 256; 0 = contiguous K/V */
    float softmax_scale;     /* 0 = 1 / sqrt(head_dim_k) */
    float softcap;           /* c > 0: a scaled score s counts as c * tanh(s / c); 0 = none */
    int32_t window;          /* tokens a row sees, itself included; 0 = all. With mask NONE as many on each side */
    const float *sinks;      /* NULL = none; else UNSUPPORTED */
    int32_t max_seqs;        /* sequences a batch; 0 = 64 */
    int32_t max_tokens;      /* query rows a batch; 0 = 4096 */
    int32_t max_context;     /* keys a sequence; 0 = 8192 */
    int64_t max_decode_keys; /* keys summed over the rows that the decode family computes in a batch, which sizes the
                                workspace; each row beyond max_seqs counts for one split (512 keys at most) more;
                                0 = max_seqs * max_context, or what a window lets so many rows see */
    int32_t steps_in_flight; /* staging slots; 0 = 2 */
    int32_t device_tables;   /* 1 = block tables and lengths may be device-resident (portable kernels then) */
    kvleaf_sharing sharing;
} kvleaf_attention_params;

#define KVLEAF_ATTENTION_PARAMS_INIT KVLEAF_INIT(kvleaf_attention_params)
#ifndef __cplusplus
#define kvleaf_attention_params(...)                                                                                   \
    (&(kvleaf_attention_params){.struct_size = sizeof(kvleaf_attention_params), __VA_ARGS__})
#endif

/* The lengths and tables of a step. Host arrays are read before the call returns. */
typedef struct kvleaf_batch {
    uint32_t struct_size;
    int32_t num_seqs;              /* 0 is a batch of nothing */
    const int32_t *cu_seqlens_q;   /* [num_seqs + 1], begins at 0, non-decreasing */
    const int32_t *cu_seqlens_k;   /* contiguous K/V: [num_seqs + 1] */
    const int32_t *seq_lens_k;     /* paged: [num_seqs] keys, those appended in this step included */
    const int32_t *block_table;    /* paged: [num_seqs, block_table_stride]; columns behind a sequence's length are
                                      never read */
    int64_t block_table_stride;    /* entries */
    int32_t num_blocks;            /* ids must lie in 0 .. num_blocks-1 */
    const int64_t *slot_mapping;   /* [total_q] for append; slot = block * block_size + offset, negative = write
                                      nothing; NULL = in place: the last seqlen_q positions of each sequence */
    const kvleaf_family *families; /* [num_seqs]; NULL = AUTO */
    const kvleaf_mask *masks;      /* [num_seqs]; NULL = CAUSAL */
    cl_mem device_block_table;     /* instead of block_table: int32; read by the kernels, ids not checked: a bad one
                                      counts as masked tokens */
    uint64_t device_block_table_offset; /* bytes */
    cl_mem device_seq_lens_k;           /* instead of the values of seq_lens_k, which then are upper bounds */
    uint64_t device_seq_lens_k_offset;  /* bytes */
} kvleaf_batch;

#define KVLEAF_BATCH_INIT KVLEAF_INIT(kvleaf_batch)

/* Device and host bytes an attention object of these params takes. INVALID, UNSUPPORTED as create. */
KVLEAF_API kvleaf_status kvleaf_attention_size(const kvleaf_device *device, const kvleaf_attention_params *params,
                                               uint64_t *device_bytes, uint64_t *host_bytes);

/* Builds the programs for the geometry and allocates staging and work buffers. Retains the device. INVALID: a field out
 * of range, num_heads no multiple of num_kv_heads. UNSUPPORTED: a feature or head_dim not served. NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_attention_create(kvleaf_device *device, const kvleaf_attention_params *params,
                                                 kvleaf_attention **out);
KVLEAF_API void kvleaf_attention_destroy(kvleaf_attention **attention);

/* The key of the variant an operation uses, such as "decode.cpu.q_f32.kv_f16.d128.b16"; "" where there is none.
 * `operation`: "append", "decode", "prefill", "gather", "merge". Valid as long as the object. */
KVLEAF_API const char *kvleaf_attention_variant(const kvleaf_attention *attention, const char *operation);

/* Checks the batch, computes the schedule and uploads both. BUSY: all staging slots are in flight. INVALID: lengths or
 * ids out of range (which one is named). TOO_SMALL: beyond the object's declared capacities. */
KVLEAF_API kvleaf_status kvleaf_attention_plan(kvleaf_attention *attention, const kvleaf_batch *batch,
                                               const kvleaf_exec *exec);

/* Writes the step's new keys and values, [total_q, num_kv_heads, head_dim] of dtype q_dtype, kv_dtype or f32, to their
 * slots, rounded to the view's dtype. Paged only. */
KVLEAF_API kvleaf_status kvleaf_attention_append(kvleaf_attention *attention, const kvleaf_tensor *k,
                                                 const kvleaf_tensor *v, const kvleaf_kv_view *view,
                                                 const kvleaf_exec *exec);

/* out[total_q, num_heads, head_dim] = softmax(scale * q k^T + mask) v over each sequence's keys; lse (may be NULL) =
 * natural logarithm of the denominators. A row that sees no key: 0 and -infinity. */
KVLEAF_API kvleaf_status kvleaf_attention_attend(kvleaf_attention *attention, const kvleaf_tensor *q,
                                                 const kvleaf_kv_view *view, const kvleaf_tensor *out,
                                                 const kvleaf_tensor *lse, const kvleaf_exec *exec);

/* Append, then attend, in one call and with the same results. Where every sequence of the batch brings one token, in
 * place (slot_mapping NULL, its own last position, or negative), by the decode family and in a block that no other
 * sequence of the batch has, the attention kernel writes the new keys and values itself, if its variant can: a launch
 * less a layer. out must not overlap k or v. Statuses of both; every check comes before the first command. */
KVLEAF_API kvleaf_status kvleaf_attention_append_attend(kvleaf_attention *attention, const kvleaf_tensor *k,
                                                        const kvleaf_tensor *v, const kvleaf_tensor *q,
                                                        const kvleaf_kv_view *view, const kvleaf_tensor *out,
                                                        const kvleaf_tensor *lse, const kvleaf_exec *exec);

/* Copies each sequence's keys and values out of the blocks: k, v [total_k, num_kv_heads, head_dim] of dtype kv_dtype,
 * packed in batch order. Paged only. */
KVLEAF_API kvleaf_status kvleaf_attention_gather(kvleaf_attention *attention, const kvleaf_kv_view *view,
                                                 const kvleaf_tensor *k, const kvleaf_tensor *v,
                                                 const kvleaf_exec *exec);

/* Merges n partial results over disjoint key sets: outs [n][rows, num_heads, head_dim] float32, part p at p *
 * out_part_stride elements, lses [n][rows, num_heads] at p * lse_part_stride. (0, -infinity) is the exact neutral
 * element. out has dtype out_dtype, lse may be NULL. Reference: Milakov and Gimelshein, 2018, section 3.1. */
KVLEAF_API kvleaf_status kvleaf_attention_merge(kvleaf_attention *attention, int32_t n, int32_t rows,
                                                const kvleaf_tensor *outs, int64_t out_part_stride,
                                                const kvleaf_tensor *lses, int64_t lse_part_stride,
                                                const kvleaf_tensor *out, const kvleaf_tensor *lse,
                                                const kvleaf_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
