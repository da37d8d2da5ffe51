/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_RIG_H
#define KVL_RIG_H

/* A managed cache on the device with a host model of it: each token of a sequence is a number, from which its keys,
 * values and queries follow in every layer. A step is run as an application runs it, and every output row is compared
 * with the float64 reference over what the model says the cache holds. Blocks nobody wrote hold NaN. */

#include <kvleaf/cache.h>

#include "reference.h"
#include "support.h"

enum { RIG_LAYERS = 4, RIG_LENGTH = 2048, RIG_SEQS = 64 };

typedef struct rig_params {
    kvleaf_dtype q_dtype, kv_dtype, out_dtype;
    kvleaf_layout layout;
    int32_t num_layers, num_heads, num_kv_heads, head_dim, block_size, num_blocks;
    int32_t kv_layer[RIG_LAYERS], window[RIG_LAYERS]; /* as kvleaf_layer */
    float softcap[RIG_LAYERS];
    int32_t layer_dim[RIG_LAYERS]; /* head_dim of a layer; 0 = head_dim */
    int32_t swap_blocks;
    int32_t window_blocks; /* of pools with a window; 0 = num_blocks */
    bool fused_first;      /* layers 0, 2, ... append and attend in one call, instead of 1, 3, ... */
    bool no_plan;          /* what needs no step needs no programs for it */
    int32_t max_sequences, max_context, max_entries, max_tokens, steps_in_flight;
    int64_t max_decode_keys;
    const int32_t *free_order; /* [num_blocks], or NULL */
    cl_command_queue_properties queue_properties;
    bool own_device; /* so also with a table or an allocator; else support_shared's */
    const kvleaf_opencl *opencl;
    kvleaf_allocator allocator;
} rig_params;

typedef struct rig_seq rig_seq;

typedef struct rig {
    rig_params p;
    kvleaf_device *device;
    cl_command_queue queue;
    kvleaf_pool *pools[RIG_LAYERS]; /* one a group */
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    int32_t num_groups, group[RIG_LAYERS];
    int32_t source[RIG_LAYERS];     /* the layer whose keys a layer reads */
    int32_t pool_layer[RIG_LAYERS]; /* where they are in the group's pool */
    cl_mem q, k, v, out, lse;
    int32_t next_token;
    rig_seq *seqs[RIG_SEQS]; /* those not ended; rig_close frees them */
    /* Outputs of the last step: [layers][max_tokens][num_heads][largest head_dim] as stored, packed from each layer's
     * start, and [layers][max_tokens][num_heads]. */
    uint8_t *out_bits;
    float *lse_values;
} rig;

/* A sequence and the tokens it is known to have, committed and extended ones. */
struct rig_seq {
    kvleaf_seq seq;
    int32_t committed, extended;
    int32_t tokens[RIG_LENGTH];
};

/* A small geometry in float32. PoCL compiles some seconds for each dtype, layout, head_dim, block size and ratio of
 * heads, windowed or not: to be changed where that is the topic, and then to what another test has already. */
rig_params rig_defaults(void);
/* Opens device, queue, pool, cache and plan; a failing call fails the test. */
void rig_open(rig *r, const rig_params *params);
void rig_close(rig *r);
/* A further queue, which the caller releases. */
cl_command_queue rig_queue(const rig *r, cl_command_queue_properties properties);
/* Cache and plan as the rig makes them, without the assertions. */
kvleaf_status rig_make_cache(rig *r);
kvleaf_status rig_make_plan(rig *r, kvleaf_plan **plan);

rig_seq *rig_seq_new(rig *r);
rig_seq *rig_seq_with(rig *r, const kvleaf_seq_params *params);
rig_seq *rig_seq_fork(rig *r, rig_seq *parent, int32_t pos);
void rig_seq_end(rig *r, rig_seq *seq);
void rig_truncate(rig *r, rig_seq *seq, int32_t length);
kvleaf_status rig_try_extend(rig *r, rig_seq *seq, int32_t count);
/* Extends by new tokens of unknown ids, or by tokens that are given; those that the prefix cache has count as committed
 * at once. */
void rig_extend(rig *r, rig_seq *seq, int32_t count);
void rig_extend_with(rig *r, rig_seq *seq, const int32_t *tokens, int32_t count);

/* A step over some sequences. */
typedef struct rig_step {
    kvleaf_plan *plan; /* NULL = the rig's */
    rig_seq *seqs[16];
    int32_t num_q[16];
    int32_t n;
    kvleaf_family family;
    kvleaf_mask mask;
    cl_command_queue queue; /* NULL = the rig's */
} rig_step;

kvleaf_exec rig_exec(const rig *r, const rig_step *step);
kvleaf_status rig_build(rig *r, const rig_step *step);
/* Appends and attends in all layers, by two calls and by one in turn; checks every row. `what` names the step where one
 * is wrong. */
void rig_layers(rig *r, const rig_step *step, const char *what);
/* The parts of rig_layers, for one layer. The queue is empty after rig_load and rig_check. */
void rig_load(rig *r, const rig_step *step, int32_t layer);
kvleaf_status rig_append(rig *r, const rig_step *step, int32_t layer);
kvleaf_status rig_append_on(rig *r, const rig_step *step, int32_t layer, const kvleaf_exec *exec);
kvleaf_status rig_attend(rig *r, const rig_step *step, int32_t layer);
kvleaf_status rig_append_attend(rig *r, const rig_step *step, int32_t layer);
void rig_check(rig *r, const rig_step *step, int32_t layer, const char *what);
/* Commits; `accepted` NULL = all. */
void rig_commit(rig *r, const rig_step *step, const int32_t *accepted);
/* All of it. */
void rig_run(rig *r, const rig_step *step, const char *what);
/* One sequence, its next num_q tokens. */
void rig_run_one(rig *r, rig_seq *seq, int32_t num_q, kvleaf_family family, const char *what);

/* Bytes of a row of the last step's output and its LSE. */
const uint8_t *rig_out(const rig *r, int32_t layer, int32_t row);
const float *rig_lse(const rig *r, int32_t layer, int32_t row);
size_t rig_row_bytes(const rig *r, int32_t layer);
int32_t rig_dim(const rig *r, int32_t layer);

/* All bytes of keys and values that a layer reads. */
uint8_t *rig_pool_bytes(const rig *r, int32_t layer, size_t *size);
/* Whether the committed tokens of a sequence lie in the pool as the model says, in every layer. */
void rig_check_stored(rig *r, const rig_seq *seq, const char *what);
/* What kvleaf_seq_export gives of some tokens, by the model; malloc'ed. */
uint8_t *rig_rows(const rig *r, const rig_seq *seq, int32_t start, int32_t count, uint64_t *size);
kvleaf_blocks_stats rig_stats(const rig *r);
/* Lets the device go on with what it can: before looking that something has not happened. */
void rig_pause(void);
/* The cache's lengths are the model's. */
void rig_check_lengths(const rig *r, const rig_seq *seq, int32_t planned);

#endif
