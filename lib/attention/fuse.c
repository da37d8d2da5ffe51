/* SPDX-License-Identifier: Apache-2.0 */
/* When decode may append: the piece of work that has a row's last split then writes the row's new token before it
 * reads, and nothing orders that against other pieces. So each sequence has one row, which brings one token, to the
 * last place that it reads, in a block that nobody else reads. The managed cache sees to the last by copy-on-write; a
 * caller's tables are searched, once a step, when the first layer asks. */
#include "attention/state.h"

#include "common/plan.h"

#include <string.h>

#define WORD_BITS 32u

void kvl_fuse_note(const kvl_engine *engine, const kvl_step *step, const int32_t *meta, kvl_schedule *at)
{
    bool may = step->slots != KVL_SLOTS_ANYWHERE && !engine->params.geometry.device_tables &&
               at->num_rows == at->total_q && at->counts.num_slots == at->total_q;
    for (int32_t i = 0; may && i < step->num_seqs; i++)
        may = step->seqs[i].q_len <= 1;
    at->slots = may ? step->slots : KVL_SLOTS_ANYWHERE;
    at->host = meta;
    if (may && at->num_rows)
        at->first_slot = ((const int64_t *)(const void *)(meta + at->slots_at))[at->first_row[ROW_Q_TOKEN]];
}

/* The blocks that new tokens go to: a hash table, and a filter that few others pass. */
typedef struct written_blocks {
    int32_t *buckets;
    uint32_t *filter;
    uint32_t size, last_bit;
} written_blocks;

static written_blocks make_written(const kvl_engine *engine, int32_t rows)
{
    written_blocks set = {.buckets = engine->buckets, .filter = (uint32_t *)engine->keys};
    uint32_t words = 1;
    while (words * 2 <= (uint32_t)rows)
        words *= 2;
    set.size = kvl_hash_size(rows);
    memset(set.buckets, 0xff, set.size * sizeof *set.buckets);
    memset(set.filter, 0, words * sizeof *set.filter);
    set.last_bit = words * WORD_BITS - 1;
    return set;
}

static bool is_written(const written_blocks *set, int32_t block)
{
    uint32_t bit = (uint32_t)block & set->last_bit;
    if (!(set->filter[bit / WORD_BITS] >> bit % WORD_BITS & 1))
        return false;
    uint32_t at = kvl_hash_place(block, set->size);
    while (set->buckets[at] >= 0 && set->buckets[at] != block)
        at = (at + 1) & (set->size - 1);
    return set->buckets[at] == block;
}

static void note_written(written_blocks *set, int32_t block)
{
    uint32_t bit = (uint32_t)block & set->last_bit, at = kvl_hash_place(block, set->size);
    set->filter[bit / WORD_BITS] |= 1u << bit % WORD_BITS;
    while (set->buckets[at] >= 0)
        at = (at + 1) & (set->size - 1);
    set->buckets[at] = block;
}

/* Whether no row of the planned step reads a block that another row's token goes to. */
static bool blocks_are_own(const kvl_engine *engine)
{
    const kvl_schedule *now = &engine->now;
    const int64_t *slots = (const int64_t *)(const void *)(now->host + now->slots_at);
    int32_t block_size = engine->params.geometry.block_size;
    written_blocks set = make_written(engine, now->num_rows);
    for (int32_t i = 0; i < now->num_rows; i++) {
        const kvl_row *row = &engine->rows[i];
        if (slots[row->q_token] < 0)
            continue;
        int32_t block = now->host[row->table + (row->end - 1) / block_size];
        if (is_written(&set, block))
            return false;
        note_written(&set, block);
    }
    for (int32_t i = 0; i < now->num_rows; i++) {
        const kvl_row *row = &engine->rows[i];
        int32_t first = row->first > 0 ? row->first / block_size : 0, own = (row->end - 1) / block_size;
        if (slots[row->q_token] < 0)
            own++; /* it has none */
        for (int32_t column = first; row->end > column * (int64_t)block_size && column < own; column++)
            if (is_written(&set, now->host[row->table + column]))
                return false;
    }
    return true;
}

bool kvl_fuse_now(kvl_engine *engine)
{
    kvl_schedule *now = &engine->now;
    if (now->slots == KVL_SLOTS_IN_PLACE)
        now->slots = blocks_are_own(engine) ? KVL_SLOTS_OWN : KVL_SLOTS_ANYWHERE;
    return now->slots == KVL_SLOTS_OWN;
}
