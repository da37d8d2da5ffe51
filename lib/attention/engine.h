/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_ENGINE_H
#define KVL_ENGINE_H

/* The machinery under both levels of the API: programs for one geometry, the step's tables on the device, launches.
 *
 * A step: kvl_engine_begin gives room in a staging slot, the caller fills the slots, updates, copies and table it asked
 * room for, kvl_engine_submit adds the schedule and uploads everything in one write; then append, attend and gather as
 * often as there are layers. A step that was begun and not submitted leaves no trace. */

#include <kvleaf/attention.h>

#include "attention/variants.h"
#include "device/chain.h"

typedef struct kvl_engine kvl_engine;

typedef struct kvl_engine_params {
    kvl_geometry geometry;
    unsigned operations; /* bits 1 << kvl_operation: the programs to build */
    int32_t max_seqs;
    int32_t max_tokens;      /* query rows a step */
    int32_t max_context;     /* keys a sequence */
    int64_t max_decode_keys; /* keys summed over the decode family's rows */
    int32_t max_updates;     /* block-table updates a step */
    int32_t max_copies;      /* block copies a step */
    int64_t max_table;       /* entries of a table uploaded with each step; 0 = the table is another buffer */
    int32_t steps_in_flight;
    kvleaf_sharing sharing;
} kvl_engine_params;

/* INVALID unless both are finite and not negative; names the layer, if it is not negative. */
kvleaf_status kvl_check_scores(float softmax_scale, float softcap, int32_t layer);

/* Bytes an engine takes on device and host; fails as create where the geometry is not served. */
kvleaf_status kvl_engine_size(const kvleaf_device *device, const kvl_engine_params *params, uint64_t *device_bytes,
                              uint64_t *host_bytes);
kvleaf_status kvl_engine_create(kvleaf_device *device, const kvl_engine_params *params, kvl_engine **out);
void kvl_engine_destroy(kvl_engine **engine);
/* Steps planned from now on are cut up and handed out as for a device of so many compute units: few of them have much
 * each to do, as many have in a large step. 0: all that it has. */
void kvl_engine_set_units(kvl_engine *engine, cl_uint units);
/* The key of the variant of an operation by its name; "" where it is not built or unknown. */
const char *kvl_engine_variant(const kvl_engine *engine, const char *operation);

/* Room in a staging slot, all of it to be filled before submit. */
typedef struct kvl_staging {
    int64_t *slots;   /* [num_slots] */
    int32_t *updates; /* [num_updates] pairs {index into the table, block} */
    int32_t *copies;  /* [num_copies] pairs {src, dst} */
    int32_t *table;   /* [num_table] */
} kvl_staging;

typedef struct kvl_counts {
    int32_t num_slots, num_updates, num_copies;
    int64_t num_table;
} kvl_counts;

/* BUSY: every staging slot is still being read by an earlier step's upload. TOO_SMALL: beyond the params. DEVICE: an
 * earlier step's upload failed. */
kvleaf_status kvl_engine_begin(kvl_engine *engine, const kvl_counts *counts, kvl_staging *out);

/* The cl_int of an upload that failed on the device, as seen by kvl_engine_begin; 0 = none did. */
cl_int kvl_engine_failure(const kvl_engine *engine);

typedef struct kvl_step_seq {
    int32_t q_len, kv_len; /* kv_len counts this step's tokens */
    int32_t table;         /* entry of the block table where it starts; contiguous: its first token */
    kvleaf_family family;
    kvleaf_mask mask;
    const int32_t *blocks; /* the same table on the host, to find what sequences share; or NULL */
} kvl_step_seq;

/* What is known of where a step's new tokens go. */
typedef enum kvl_ownership {
    KVL_SLOTS_ANYWHERE, /* nothing */
    KVL_SLOTS_IN_PLACE, /* a slot is its token's place in its sequence's table, or negative */
    KVL_SLOTS_OWN       /* that, and no other sequence of the step has its block in the part that is read */
} kvl_ownership;

typedef struct kvl_step {
    const kvl_step_seq *seqs; /* [num_seqs] */
    int32_t num_seqs;
    int32_t num_blocks;        /* of the K/V buffers */
    cl_mem table;              /* the block table; NULL = the one staged with the step (or none: contiguous) */
    cl_mem device_lens;        /* NULL, or int32 [num_seqs]: the true lengths, at most the kv_lens above */
    int64_t device_lens_first; /* ints */
    kvl_ownership slots;
} kvl_step;

/* Computes the schedule, checks it against the params, uploads it on the chain, applies the table updates. After a
 * failure the slot is free again and the engine has no step. TOO_SMALL names the capacity. */
kvleaf_status kvl_engine_submit(kvl_engine *engine, const kvl_step *step, kvl_chain *chain);

/* Where the step's block copies lie on the device, for kvl_pool_copier_chain. */
cl_mem kvl_engine_meta(const kvl_engine *engine);
int32_t kvl_engine_copies_at(const kvl_engine *engine);

/* Rows and keys of the submitted step, 0 before one. */
int32_t kvl_engine_total_q(const kvl_engine *engine);

/* A paged or contiguous view with its strides resolved, as kernels take it, for K and for V. */
typedef struct kvl_view {
    cl_mem k, v;
    cl_long4 k_view, v_view; /* offset, block stride, token stride, head stride; elements */
} kvl_view;

/* Checks the view against the geometry and the buffers' sizes and contexts. */
kvleaf_status kvl_engine_view(const kvl_engine *engine, const kvleaf_kv_view *view, kvl_view *out);

/* A layer's new keys and values. */
typedef struct kvl_fresh {
    const kvleaf_tensor *k, *v;
} kvl_fresh;

/* One launch each and more; all checks of tensors come first, so that a failed check leaves everything as it was. */
kvleaf_status kvl_engine_append(kvl_engine *engine, const kvl_fresh *fresh, const kvl_view *view, kvl_chain *chain);
kvleaf_status kvl_engine_attend(kvl_engine *engine, const kvleaf_tensor *q, const kvl_view *view,
                                const kvleaf_tensor *out, const kvleaf_tensor *lse, float softmax_scale,
                                kvl_chain *chain);
/* Both, one after the other. Where every sequence brings one token of the decode family, its kernel appends: fuse.c. */
kvleaf_status kvl_engine_append_attend(kvl_engine *engine, const kvl_fresh *fresh, const kvleaf_tensor *q,
                                       const kvl_view *view, const kvleaf_tensor *out, const kvleaf_tensor *lse,
                                       float softmax_scale, kvl_chain *chain);
kvleaf_status kvl_engine_gather(kvl_engine *engine, const kvl_view *view, const kvleaf_tensor *k,
                                const kvleaf_tensor *v, kvl_chain *chain);

typedef struct kvl_merge {
    int32_t n, rows;
    const kvleaf_tensor *outs, *lses;
    int64_t out_part_stride, lse_part_stride;
    const kvleaf_tensor *out, *lse; /* lse may be NULL */
} kvl_merge;

kvleaf_status kvl_engine_merge(kvl_engine *engine, const kvl_merge *merge, kvl_chain *chain);

#endif
