/* SPDX-License-Identifier: Apache-2.0 */
/* The model's steps, its device, and what is counted. */
#include "blocks_model.h"

#include <string.h>

bool model_named_before(const int32_t *seqs, int32_t at)
{
    for (int32_t i = 0; i < at; i++)
        if (seqs[i] == seqs[at])
            return true;
    return false;
}

kvleaf_status model_begin(model *m, const int32_t *seqs, const int32_t *num_q, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const model_sequence *s = &m->sequences[seqs[i]];
        if (model_named_before(seqs, i))
            return KVLEAF_INVALID;
        if (model_is_planned(s) || s->swapped)
            return KVLEAF_BUSY;
        if (num_q[i] < 1 || num_q[i] > s->extended - s->committed)
            return KVLEAF_INVALID;
    }
    for (int32_t i = 0; i < n; i++)
        m->sequences[seqs[i]].planned += num_q[i];
    return KVLEAF_OK;
}

static bool copy_is_pending(const model *m, const model_sequence *s)
{
    for (int32_t group = 0; group < m->p.num_groups; group++)
        if (model_filler(&m->groups[group], s->table[group][s->committed / m->p.block_size]) != MODEL_NONE)
            return true;
    return false;
}

/* The step's kernels write what they computed. */
static void write_tokens(model *m, const model_sequence *s)
{
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int64_t i = s->committed; i < s->planned; i++)
            m->groups[group].memory[s->table[group][i / m->p.block_size]][i % m->p.block_size] = s->tokens[i].content;
}

kvleaf_status model_commit(model *m, const int32_t *seqs, const int32_t *accepted, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const model_sequence *s = &m->sequences[seqs[i]];
        int64_t most = s->planned - s->committed, taken = accepted ? accepted[i] : most;
        if (model_named_before(seqs, i) || !model_is_planned(s) || taken < 0 || taken > most)
            return KVLEAF_INVALID;
        if (taken > 0 && copy_is_pending(m, s))
            return KVLEAF_INVALID;
    }
    for (int32_t i = 0; i < n; i++) {
        model_sequence *s = &m->sequences[seqs[i]];
        int64_t reached = accepted ? s->committed + accepted[i] : s->planned;
        bool rejected = reached < s->planned;
        write_tokens(m, s);
        for (int32_t group = 0; group < m->p.num_groups; group++)
            for (int64_t at = s->committed; at < reached; at++)
                model_unlink(m, group, s->table[group][at / m->p.block_size]);
        s->committed = s->planned = reached;
        if (rejected)
            model_cut(m, s, reached);
        model_follow(m, s);
        model_move_windows(m, s);
    }
    return KVLEAF_OK;
}

kvleaf_status model_rollback(model *m, const int32_t *seqs, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (model_named_before(seqs, i) || !model_is_planned(&m->sequences[seqs[i]]))
            return KVLEAF_INVALID;
    for (int32_t i = 0; i < n; i++) {
        model_sequence *s = &m->sequences[seqs[i]];
        write_tokens(m, s); /* the kernels may have run: it must not matter */
        s->planned = s->committed;
    }
    return KVLEAF_OK;
}

bool model_make_copies(model *m, int32_t group, const kvleaf_block_copy *copies, int32_t count)
{
    model_group *g = &m->groups[group];
    uint64_t before[MODEL_BLOCKS][MODEL_SLOTS];
    memcpy(before, g->memory, sizeof before);
    for (int32_t i = 0; i < count; i++) {
        int32_t at = model_filler(g, copies[i].dst);
        if (at == MODEL_NONE || g->copies_src.blocks[at] != copies[i].src)
            return false;
        memcpy(g->memory[copies[i].dst], before[copies[i].src], sizeof before[0]);
        model_end_copy(m, group, at);
    }
    g->copies_made += (uint64_t)count;
    return true;
}

uint64_t model_read(const model *m, int32_t group, int32_t block, int64_t position)
{
    const model_group *g = &m->groups[group];
    int32_t at = model_filler(g, block);
    return g->memory[at != MODEL_NONE ? g->copies_src.blocks[at] : block][position % m->p.block_size];
}

void model_count(const model *m, int32_t group, model_counts *counts)
{
    memset(counts, 0, sizeof *counts);
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        const model_sequence *s = &m->sequences[i];
        for (int32_t j = 0; s->live && !s->swapped && j < s->count; j++) {
            int32_t block = s->table[group][j];
            int64_t here = s->extended - (int64_t)j * m->p.block_size;
            if (block == MODEL_NONE)
                continue;
            here = here > m->p.block_size ? m->p.block_size : here;
            counts->holders[block]++;
            counts->slots[block] = here > counts->slots[block] ? (int32_t)here : counts->slots[block];
        }
    }
}

void model_stats(const model *m, int32_t group, const model_counts *counts, kvleaf_blocks_stats *stats)
{
    const model_group *g = &m->groups[group];
    *stats = (kvleaf_blocks_stats){.struct_size = sizeof *stats, .total = m->p.groups[group].num_blocks};
    stats->free = g->free.count;
    stats->cached = g->cached.count;
    stats->used = stats->total - g->free.count - g->cached.count;
    bool listed[MODEL_BLOCKS] = {false};
    for (int32_t i = 0; i < g->free.count; i++)
        listed[g->free.blocks[i]] = true;
    for (int32_t i = 0; i < g->cached.count; i++)
        listed[g->cached.blocks[i]] = true;
    for (int32_t block = 0; block < stats->total; block++) {
        stats->pinned += counts->holders[block] == 0 && !listed[block];
        stats->slots_wasted += listed[block] ? 0 : m->p.block_size - counts->slots[block];
    }
    for (int32_t i = 0; i < MODEL_BLOCKS; i++)
        stats->indexed += m->entries[i].serial && m->entries[i].block[group] != MODEL_NONE;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        stats->sequences += m->sequences[i].live;
        stats->swapped += m->sequences[i].live && m->sequences[i].swapped;
        stats->tokens += m->sequences[i].live ? m->sequences[i].extended : 0;
    }
    stats->copies = g->copies_made;
    stats->evictions = g->evictions;
    stats->host_total = m->p.groups[group].swap_blocks;
    stats->host_used = model_hosts_used(m, group);
    stats->swapped_out = g->swapped_out;
    stats->swapped_in = g->swapped_in;
    stats->looked_up = m->looked_up;
    stats->hits = m->hits;
}
