/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_ATTENTION_STATE_H
#define KVL_ATTENTION_STATE_H

/* The engine's insides, shared by engine.c, schedule.c, rows.c, runs.c, tiles.c, queue.c, fuse.c, tensors.c and
 * launch.c. */

#include "attention/engine.h"

/* A run is a power of two of splits. */
enum { KVL_RUN_LEVELS = 7, KVL_LONGEST_RUN = 1 << (KVL_RUN_LEVELS - 1) };

/* Pieces of work in a queue are up to so long. */
enum { KVL_QUEUE_LONGEST = 64, KVL_QUEUE_PLACES = 2 * KVL_QUEUE_LONGEST };
_Static_assert((int)KVL_LONGEST_RUN <= (int)KVL_QUEUE_LONGEST, "runs are such pieces");

/* Where the submitted step's sections lie in the plan's int array, and how long they are. */
typedef struct kvl_schedule {
    int32_t slots_at, updates_at, copies_at, table_at;
    int32_t rows_at, splits_at, entries_at, items_at, claims_at, gather_at, resolve_at;
    kvl_counts counts;
    int32_t num_rows, num_splits, num_entries, num_items, num_claims, num_seqs, num_resolve;
    int32_t total_q, total_k, num_blocks;
    int32_t first_run[KVL_LONGEST_RUN + 1]; /* of those of each length, the longest first */
    bool even_runs;                         /* all are of one length */
    int32_t first_row[6]; /* of the decode family, as plan.h has it; a step of one row brings it as an argument */
    int32_t used;         /* ints */
    cl_mem table;         /* external, or NULL: the section at table_at */
    kvl_ownership slots;  /* OWN: decode may append; IN_PLACE: may, where kvl_fuse_now finds that they are own */
    int64_t first_slot;   /* of first_row, where decode may append */
    const int32_t *host;  /* the int array, as it was uploaded, until the next step is begun */
    bool ready;           /* a step is submitted */
} kvl_schedule;

/* How many of each a step may have. */
typedef struct kvl_capacity {
    int64_t rows, splits, items, claims, resolve;
    int64_t ints; /* of the whole array */
} kvl_capacity;

typedef struct kvl_staging_slot {
    int32_t *host;     /* [capacity.ints]; those of the queue stay zero */
    cl_event uploaded; /* of the write that reads it; NULL = free */
} kvl_staging_slot;

/* A row of the decode family, which sees the keys first .. end-1 of its sequence: first may be negative, end too where
 * it sees none. */
typedef struct kvl_row {
    int32_t seq, q_token, table;
    int32_t first, end, splits;
    int32_t run_level;     /* its runs are of 1 << run_level splits */
    const int32_t *blocks; /* its table on the host, where it may share splits from the first on; else NULL */
} kvl_row;

struct kvl_engine {
    kvleaf_device *device;
    kvl_engine_params params;
    cl_uint units; /* compute units that steps are cut up for and handed out to */
    kvl_chosen chosen[KVL_OPERATIONS];
    kvl_kernel append, decode, fold, prefill, gather, merge, update, resolve;
    cl_mem meta;        /* the step's int array, and decode's workspace behind it */
    cl_long2 workspace; /* as kvl_decode takes it: where its counters of rows and its partials lie */
    kvl_capacity capacity;
    int32_t tile_queries, tile_heads; /* of a prefill item at most */
    int32_t tile_part;                /* queries of the lowest; others have a multiple, but for a sequence's last */
    kvl_staging_slot *slots;          /* [params.steps_in_flight] */
    int32_t *order;                   /* [max_seqs] scratch: prefill entries by descending work */
    kvl_row *rows;                    /* [capacity.rows] scratch: of the step, in the order of the batch */
    int32_t *row_order, *shared;      /* [capacity.rows] scratch: rows as they stand on the device, and how many splits
                                         of each are also the next one's */
    int32_t *keys, *buckets;          /* [capacity.rows], [4 * capacity.rows] scratch of the order */
    kvl_staging_slot *open;           /* begun and not submitted */
    kvl_schedule begun, now;
    cl_int failure; /* of an upload, on the device */
};

/* Whether the decode family computes a sequence. */
bool kvl_is_decode(const kvl_step_seq *seq);

/* Capacities that the params ask for. NO_MEMORY or INVALID where they overflow. */
kvleaf_status kvl_schedule_capacity(const kvl_engine *engine, kvl_capacity *out);

/* Lays out the caller's sections at the front of the array. TOO_SMALL beyond the params. */
kvleaf_status kvl_schedule_begin(const kvl_engine *engine, const kvl_counts *counts, kvl_schedule *out);

/* Writes the schedule of a step behind the caller's sections. */
kvleaf_status kvl_schedule_build(kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *schedule);

/* Where a sequence's table starts for the kernels. */
int32_t kvl_table_start(const kvl_engine *engine, const kvl_step *step, const kvl_schedule *at,
                        const kvl_step_seq *seq);

/* A record for portable/resolve.cl: the int at `target` is lowered to a sequence's length less `subtract`. */
#define KVL_RESOLVE_INTS 3
static inline int32_t *kvl_put_resolve(int32_t *record, int32_t target, int32_t seq, int32_t subtract)
{
    record[0] = target;
    record[1] = seq;
    record[2] = subtract;
    return record + KVL_RESOLVE_INTS;
}

/* The size of a hash table for so many keys, a power of two, and the place of a key in it: by 2^32 over the golden
 * ratio (Knuth, The Art of Computer Programming, 6.4). */
static inline uint32_t kvl_hash_size(int32_t keys)
{
    uint32_t size = 4;
    while (size < 2 * (uint32_t)keys)
        size *= 2;
    return size;
}

static inline uint32_t kvl_hash_place(int32_t key, uint32_t size)
{
    return (uint32_t)key * 2654435761u >> 8 & (size - 1);
}

/* Whether decode is one launch: its kernel folds all of a row's splits. */
static inline bool kvl_folds_itself(const kvl_engine *engine)
{
    const kvl_variant *variant = engine->chosen[KVL_DECODE].variant;
    return variant->longest_run && !variant->kernels[1];
}

/* Pieces of work that a row comes in. */
static inline int32_t kvl_row_pieces(const kvl_row *row)
{
    return ((row->splits - 1) >> row->run_level) + 1;
}

/* Ints of a piece of decode work, by the variant. */
int32_t kvl_rows_item_ints(const kvl_engine *engine);
/* Takes the step's decode rows in. False: their splits are more than the capacity. */
bool kvl_rows_collect(kvl_engine *engine, const kvl_step *step, kvl_schedule *at, int64_t *splits);
/* Orders them so that those that share splits are neighbours, where sharing is wanted. */
void kvl_rows_order(kvl_engine *engine, int32_t num_rows);
/* Writes rows, pieces and, at `resolve`, the rows' records. */
void kvl_rows_write(const kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *at, int32_t *resolve);

/* For a variant with `longest_run`: the order of the rows; then how long the runs of each are, and how many there are
 * of each length. */
void kvl_runs_order(kvl_engine *engine, int32_t num_rows);
void kvl_runs_choose(const kvl_engine *engine, kvl_schedule *at);
/* Writes the runs; their rows are written already. */
void kvl_runs_write(const kvl_engine *engine, int32_t *meta, const kvl_schedule *at);

/* Units by what they have to do: having[(least + i) % KVL_QUEUE_PLACES] of them have alike + least + i. */
typedef struct kvl_loads {
    int64_t alike, least, having[KVL_QUEUE_PLACES];
} kvl_loads;

/* What units have that took pieces from a queue, the longest first: `times` times pieces[length] of each length up to
 * `longest`. */
kvl_loads kvl_queue_share(const int32_t *pieces, int32_t longest, int64_t times, int64_t units);
/* The most that one has. */
int64_t kvl_queue_last(const kvl_loads *loads);

/* Items that a step may have. */
int64_t kvl_tiles_most(const kvl_engine *engine);
/* Chooses and writes the prefill family's items; its entries, one at least, are written already. */
void kvl_tiles_write(const kvl_engine *engine, int32_t *meta, kvl_schedule *at);

/* Notes in a schedule that is written whether its decode rows may append their tokens themselves. */
void kvl_fuse_note(const kvl_engine *engine, const kvl_step *step, const int32_t *meta, kvl_schedule *at);
/* Whether they do. */
bool kvl_fuse_now(kvl_engine *engine);

/* A tensor as a kernel takes it. */
typedef struct kvl_bound {
    cl_mem memory;  /* NULL where the call has none */
    uint64_t bytes; /* of the whole buffer */
    cl_long4 view;  /* as a kernel takes it, in elements: offset, token stride, head stride, 0; of K and V as kvl_view
                       has them */
} kvl_bound;

typedef struct kvl_expect {
    const char *name; /* for messages */
    int64_t tokens, heads, dim;
    bool output;             /* its elements must not overlap */
    const kvl_bound *beside; /* bound before in the same call: where both lie in one buffer, the driver is not asked
                                about it again; or NULL */
} kvl_expect;

/* Checks handle, context, dtype's size, strides and the buffer's size; resolves packed strides. */
kvleaf_status kvl_bind_tensor(const kvl_engine *engine, const kvleaf_tensor *tensor, const kvl_expect *expect,
                              kvl_bound *out);
kvleaf_status kvl_check_dtype(const char *name, kvleaf_dtype given, kvleaf_dtype wanted);

#endif
