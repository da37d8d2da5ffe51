/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_CACHE_H
#define KVLEAF_CACHE_H

/* The managed cache: block manager, pool and attention kernels, one step at a time.
 *
 *   kvleaf_seq_extend(cache, seq, &tokens, &cached)     takes the blocks, copy-on-write ones included
 *   kvleaf_plan_build(plan, cache, batch, n, &exec)     pending block copies, changed table entries, schedule
 *   for each layer: kvleaf_append_attend(plan, layer, k, v, q, out, lse, &exec), or its two halves,
 *                   kvleaf_append(plan, layer, k, v, &exec); kvleaf_attend(plan, layer, q, out, lse, &exec)
 *   kvleaf_plan_commit(plan, accepted)                  or kvleaf_plan_rollback(plan)
 *
 * Calls on one cache run on the device in call order, on any queue of its context: the cache keeps one tail event.
 * Thread rule: one thread at a time per cache; append, attend and append_attend read only the plan and the tail, so
 * those of an open plan may run beside other calls on its cache. */

#include <kvleaf/attention.h>
#include <kvleaf/blocks.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvleaf_cache kvleaf_cache;
typedef struct kvleaf_plan kvleaf_plan;

typedef struct kvleaf_layer {
    int32_t num_heads, num_kv_heads;
    int32_t head_dim_k, head_dim_v; /* head_dim_v 0 = head_dim_k; another value is UNSUPPORTED */
    int32_t window;                 /* tokens a row sees, itself included; 0 = all */
    float softmax_scale;            /* 0 = 1 / sqrt(head_dim_k) */
    float softcap;                  /* c > 0: a scaled score s counts as c * tanh(s / c); 0 = none */
    const float *sinks;             /* NULL = none; else UNSUPPORTED */
    int32_t kv_layer;               /* 0 = K/V of its own; n = reads those of layer n - 1, an earlier one */
} kvleaf_layer;

typedef struct kvleaf_cache_params {
    uint32_t struct_size;
    const kvleaf_layer *layers; /* [num_layers], copied. Layers of one num_kv_heads, head_dim and window are a
                                   group; within a group num_heads and softcap are one, else
                                   UNSUPPORTED */
    int32_t num_layers;
    kvleaf_pool *const *pools; /* [num_pools], retained; one a group, in the order in which the groups first occur
                                  in `layers`; its num_layers = the group's layers with K/V of their own; all of
                                  one block size */
    int32_t num_pools;
    kvleaf_dtype q_dtype, out_dtype;
    int32_t max_sequences;     /* live at once; 0 = 256 */
    int32_t max_context;       /* tokens a sequence; 0 = what the largest pool holds. At most what the smallest
                                  pool of layers without a window holds */
    const int32_t *free_order; /* as kvleaf_blocks_params; with more than one group NULL */
    int32_t free_count;
    int32_t swap_blocks;     /* blocks a group in host memory for swapped sequences; 0 = no swap */
    int32_t no_prefix_cache; /* these as kvleaf_blocks_params */
    const kvleaf_eviction *eviction;
    kvleaf_event_fn event;
    void *event_user;
    uint64_t (*now_ms)(void *user);
    void *now_user;
} kvleaf_cache_params;

#define KVLEAF_CACHE_PARAMS_INIT KVLEAF_INIT(kvleaf_cache_params)
#ifndef __cplusplus
#define kvleaf_cache_params(...) (&(kvleaf_cache_params){.struct_size = sizeof(kvleaf_cache_params), __VA_ARGS__})
#endif

typedef struct kvleaf_plan_params {
    uint32_t struct_size;
    int32_t max_entries;     /* sequences a step; 0 = the cache's max_sequences */
    int32_t max_tokens;      /* query rows a step; 0 = 4096 */
    int64_t max_decode_keys; /* as kvleaf_attention_params; 0 = max_entries * max_context, at most
                                4 x the pool's slots + max_entries x 512 */
    int32_t steps_in_flight; /* 0 = 2 */
    kvleaf_sharing sharing;  /* as kvleaf_attention_params */
} kvleaf_plan_params;

#define KVLEAF_PLAN_PARAMS_INIT KVLEAF_INIT(kvleaf_plan_params)
#ifndef __cplusplus
#define kvleaf_plan_params(...) (&(kvleaf_plan_params){.struct_size = sizeof(kvleaf_plan_params), __VA_ARGS__})
#endif

/* What one sequence computes in a step: its next num_q extended, uncomputed tokens. */
typedef struct kvleaf_batch_entry {
    kvleaf_seq seq;
    int32_t num_q; /* >= 1 */
    kvleaf_family family;
    kvleaf_mask mask;
    uint32_t flags;    /* 0 */
    kvleaf_seq kv_seq; /* 0 */
} kvleaf_batch_entry;

/* Makes a cache over the pools and builds nothing yet. Retains device and pools. INVALID: a null, a group whose pool
 * has another geometry, more or fewer pools than groups, a GQA ratio that is no integer. UNSUPPORTED: a layer that
 * reads the K/V of one of another group, several num_heads or softcaps in a group, sinks. FOREIGN: a pool of another
 * device. NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_cache_create(kvleaf_device *device, const kvleaf_cache_params *params,
                                             kvleaf_cache **out);
/* NULL is safe; sets *cache to NULL. Its plans must be destroyed first. Waits for nothing but the
 * copies of swaps that are still in flight. */
KVLEAF_API void kvleaf_cache_destroy(kvleaf_cache **cache);

/* The group of a layer, as the calls below number them; -1 out of range. */
KVLEAF_API int32_t kvleaf_cache_group(const kvleaf_cache *cache, int32_t layer);

/* Sequences and the prefix cache: as kvleaf_blocks_*, with the same statuses. extend also answers DEVICE after a device
 * error. */
KVLEAF_API kvleaf_status kvleaf_seq_create(kvleaf_cache *cache, const kvleaf_seq_params *params, kvleaf_seq *out);
KVLEAF_API kvleaf_status kvleaf_seq_extend(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_tokens *tokens,
                                           int64_t *cached);
KVLEAF_API kvleaf_status kvleaf_can_extend(const kvleaf_cache *cache, kvleaf_seq seq, int64_t count, bool *out);
KVLEAF_API kvleaf_status kvleaf_prefix_match(const kvleaf_cache *cache, const kvleaf_seq_params *params,
                                             const kvleaf_tokens *tokens, int64_t *matched);
KVLEAF_API kvleaf_status kvleaf_prefix_clear(kvleaf_cache *cache);
KVLEAF_API kvleaf_status kvleaf_seq_set_ids(kvleaf_cache *cache, kvleaf_seq seq, int64_t start, const int32_t *ids,
                                            int64_t count);
KVLEAF_API kvleaf_status kvleaf_seq_fork(kvleaf_cache *cache, kvleaf_seq seq, int64_t pos, kvleaf_seq *child);
KVLEAF_API kvleaf_status kvleaf_seq_rearrange(kvleaf_cache *cache, const kvleaf_seq *seqs, const int32_t *parents,
                                              int32_t n);
KVLEAF_API kvleaf_status kvleaf_seq_truncate(kvleaf_cache *cache, kvleaf_seq seq, int64_t length);
KVLEAF_API kvleaf_status kvleaf_seq_destroy(kvleaf_cache *cache, kvleaf_seq *seq);
KVLEAF_API kvleaf_status kvleaf_seq_query(const kvleaf_cache *cache, kvleaf_seq seq, kvleaf_seq_info *info);
KVLEAF_API kvleaf_status kvleaf_seq_table(const kvleaf_cache *cache, kvleaf_seq seq, int32_t group, int32_t *table,
                                          int32_t capacity, int32_t *count);
KVLEAF_API kvleaf_status kvleaf_block_pin(kvleaf_cache *cache, int32_t group, int32_t block);
KVLEAF_API kvleaf_status kvleaf_block_unpin(kvleaf_cache *cache, int32_t group, int32_t block);
KVLEAF_API kvleaf_status kvleaf_cache_query(const kvleaf_cache *cache, kvleaf_blocks_stats *stats);
KVLEAF_API kvleaf_status kvleaf_cache_describe(const kvleaf_cache *cache, kvleaf_format format, char *buffer,
                                               size_t capacity, size_t *size);
/* The cache's block manager, to look at; NULL for a null cache. */
KVLEAF_API const kvleaf_blocks *kvleaf_cache_blocks(const kvleaf_cache *cache);

/* Swaps a sequence's blocks to host memory, or back. The copies are enqueued, ordered with the cache's other calls, so
 * that the blocks can be handed out again at once; nothing is waited for. While it is out, a sequence can only be
 * queried, swapped in and destroyed. All or nothing, but that cached blocks evicted for a swap that failed stay so.
 * UNSUPPORTED: the cache has no swap_blocks. Others as kvleaf_blocks_swap_out and _in (pending copies are made first),
 * and DEVICE. */
KVLEAF_API kvleaf_status kvleaf_seq_swap_out(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_exec *exec);
KVLEAF_API kvleaf_status kvleaf_seq_swap_in(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_exec *exec);

/* Bytes that `count` tokens take in export and import: of each group, each of its layers with K/V of its own: K
 * [count, num_kv_heads, head_dim], then V, of the pool's dtype. UINT64_MAX where it is more; 0 for a null cache. */
KVLEAF_API uint64_t kvleaf_cache_token_bytes(const kvleaf_cache *cache, int64_t count);
/* Reads the K and V of committed tokens start .. start + count - 1 into `bytes`, and waits for the device. INVALID: a
 * range beyond the committed length, or one whose blocks left a window. TOO_SMALL: `size`. BUSY: swapped out. FOREIGN,
 * STALE, NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_seq_export(kvleaf_cache *cache, kvleaf_seq seq, int64_t start, int64_t count,
                                           void *bytes, uint64_t size, const kvleaf_exec *exec);
/* Fills tokens that the sequence has extended and not committed from `bytes`, as export wrote them, commits them, and
 * waits for the device. Tokens of the range that are committed already are left as they are. INVALID: start beyond the
 * committed length, an end beyond the extended one, a `size` that is not what count takes. BUSY: in an open plan, or
 * swapped out. FOREIGN, STALE, NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_seq_import(kvleaf_cache *cache, kvleaf_seq seq, int64_t start, int64_t count,
                                           const void *bytes, uint64_t size, const kvleaf_exec *exec);

/* Makes a plan for steps of this cache: programs, staging and work buffers. `params` may be NULL: all defaults. As
 * kvleaf_attention_create. */
KVLEAF_API kvleaf_status kvleaf_plan_create(kvleaf_cache *cache, const kvleaf_plan_params *params, kvleaf_plan **out);
/* NULL is safe; an open step is rolled back; sets *plan to NULL. */
KVLEAF_API void kvleaf_plan_destroy(kvleaf_plan **plan);

/* Opens a step over n entries of distinct sequences, packed in this order in q, k, v and out. INVALID: an entry out of
 * range. BUSY: the plan has an open step, a sequence is in another open plan, or all staging slots are in flight.
 * TOO_SMALL: beyond the plan's capacities. FOREIGN, STALE. DEVICE: now, or from an earlier step. All or nothing. */
KVLEAF_API kvleaf_status kvleaf_plan_build(kvleaf_plan *plan, kvleaf_cache *cache, const kvleaf_batch_entry *batch,
                                           int32_t n, const kvleaf_exec *exec);

/* Writes the step's new keys and values of a layer, [total_q, num_kv_heads, head_dim] of dtype q_dtype, the pool's or
 * f32, to their slots. INVALID: no open step, a layer that has no K/V of its own. */
KVLEAF_API kvleaf_status kvleaf_append(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *k, const kvleaf_tensor *v,
                                       const kvleaf_exec *exec);

/* out[total_q, num_heads, head_dim]: each row's attention over its sequence's keys, those appended in this step
 * included. lse [total_q, num_heads] float32 may be NULL. As kvleaf_attention_attend. */
KVLEAF_API kvleaf_status kvleaf_attend(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *q,
                                       const kvleaf_tensor *out, const kvleaf_tensor *lse, const kvleaf_exec *exec);

/* Append, then attend, in one call and with the same results. Where every entry of the step is one token of the decode
 * family, the attention kernel writes the new keys and values itself, if its variant can: a launch less a layer. out
 * must not overlap k or v. Some drivers take time of a launch for each buffer: q, k, v and out in one buffer, apart by
 * their offsets, cost the host least. Statuses of both; every check comes before the first command. */
KVLEAF_API kvleaf_status kvleaf_append_attend(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *k,
                                              const kvleaf_tensor *v, const kvleaf_tensor *q, const kvleaf_tensor *out,
                                              const kvleaf_tensor *lse, const kvleaf_exec *exec);

/* Copies the keys and values of the step's sequences (planned length) of a layer out of the pool, packed:
 * k, v [total_k, num_kv_heads, head_dim] of the pool's dtype. INVALID: as attend, and where blocks of one of the
 * sequences have left the layer's window. */
KVLEAF_API kvleaf_status kvleaf_gather(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *k, const kvleaf_tensor *v,
                                       const kvleaf_exec *exec);

/* Closes the step: of entry i the first accepted[i] tokens (NULL = all) count as computed, the rest is truncated.
 * INVALID: no open step; accepted[i] out of 0 .. num_q; after a failed append or attend the step can only be rolled
 * back. */
KVLEAF_API kvleaf_status kvleaf_plan_commit(kvleaf_plan *plan, const int32_t *accepted);
/* Returns to just before plan_build: what was extended stays, uncomputed. INVALID: no open step. */
KVLEAF_API kvleaf_status kvleaf_plan_rollback(kvleaf_plan *plan);

/* As kvleaf_attention_variant, for the layers of the first group. */
KVLEAF_API const char *kvleaf_plan_variant(const kvleaf_plan *plan, const char *operation);

#ifdef __cplusplus
}
#endif
#endif
