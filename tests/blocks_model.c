/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks_model.h"

#include <string.h>

static uint64_t mixed(uint64_t before, uint64_t with)
{
    uint64_t bits = (before ^ with) + 0x9e3779b97f4a7c15u;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u; /* the finaliser of splitmix64 */
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

static int32_t blocks_for(const model *m, int64_t tokens)
{
    return (int32_t)((tokens + m->p.block_size - 1) / m->p.block_size);
}

static int32_t holders_of(const model *m, int32_t group, int32_t block)
{
    int32_t count = 0;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        for (int32_t j = 0; m->sequences[i].live && j < m->sequences[i].count; j++)
            count += m->sequences[i].table[group][j] == block;
    return count;
}

static int32_t readers(const model_group *g, int32_t block)
{
    int32_t count = 0;
    for (int32_t i = 0; i < g->num_copies; i++)
        count += g->copies[i].src == block;
    return count;
}

int32_t model_filler(const model *m, int32_t group, int32_t block)
{
    const model_group *g = &m->groups[group];
    for (int32_t i = 0; i < g->num_copies; i++)
        if (g->copies[i].dst == block)
            return i;
    return -1;
}

void model_init(model *m, const model_params *params)
{
    memset(m, 0, sizeof *m);
    m->p = *params;
    for (int32_t i = 0; i < params->num_groups; i++) {
        const model_group_params *from = &params->groups[i];
        model_group *g = &m->groups[i];
        memcpy(g->free, from->free_order, sizeof g->free);
        g->num_free = from->free_count;
    }
}

static void free_if_unheld(model *m, int32_t group, int32_t block)
{
    model_group *g = &m->groups[group];
    if (readers(g, block) == 0)
        g->copied_slots[block] = 0;
    if (readers(g, block) == 0 && holders_of(m, group, block) == 0)
        g->free[g->num_free++] = block;
}

static void end_copy(model *m, int32_t group, int32_t at)
{
    model_group *g = &m->groups[group];
    int32_t source = g->copies[at].src;
    g->num_copies--;
    memmove(&g->copies[at], &g->copies[at + 1], (size_t)(g->num_copies - at) * sizeof *g->copies);
    free_if_unheld(m, group, source);
}

/* After a table lost `block`. */
static void lose(model *m, int32_t group, int32_t block)
{
    if (block == MODEL_NO_BLOCK)
        return;
    free_if_unheld(m, group, block);
    if (holders_of(m, group, block) == 0 && model_filler(m, group, block) >= 0)
        end_copy(m, group, model_filler(m, group, block));
}

static int32_t take(model_group *g)
{
    int32_t block = g->free[0];
    g->num_free--;
    memmove(g->free, g->free + 1, (size_t)g->num_free * sizeof *g->free);
    return block;
}

static void cut(model *m, model_sequence *s, int64_t length)
{
    int32_t keep = blocks_for(m, length);
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        for (int32_t i = s->count - 1; i >= keep; i--) {
            int32_t block = s->table[group][i];
            s->table[group][i] = MODEL_NO_BLOCK;
            lose(m, group, block);
        }
    }
    s->count = keep;
    s->extended = length;
    s->committed = s->committed > length ? length : s->committed;
    s->planned = s->committed;
}

/* The first entry of a table that the window of the token at `position` needs. */
static int32_t first_needed(const model *m, int32_t group, int64_t position)
{
    int32_t window = m->p.groups[group].window;
    return window == 0 || position < window ? 0 : (int32_t)((position - window + 1) / m->p.block_size);
}

/* Whether a sequence of these first `length` tokens could go on. */
static bool window_is_there(const model *m, const model_sequence *s, int64_t length)
{
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int32_t i = first_needed(m, group, length); i < blocks_for(m, length); i++)
            if (s->table[group][i] == MODEL_NO_BLOCK)
                return false;
    return true;
}

static bool is_planned(const model_sequence *s)
{
    return s->planned > s->committed;
}

static int32_t unused(const model *m)
{
    for (int32_t i = 0; i < m->p.max_sequences; i++)
        if (!m->sequences[i].live)
            return i;
    return -1;
}

kvleaf_status model_create(model *m, const kvleaf_seq_params *params, int32_t *made)
{
    int32_t at = unused(m);
    if (at < 0)
        return KVLEAF_TOO_SMALL;
    model_sequence *s = &m->sequences[at];
    memset(s, 0, sizeof *s);
    s->live = true;
    if (params)
        s->user = params->user;
    *made = at;
    return KVLEAF_OK;
}

/* The tokens as they will stand in the sequence, contents included. */
static void put_tokens(const model *m, model_sequence *s, const kvleaf_tokens *tokens, const int32_t *ids)
{
    (void)m;
    for (int64_t i = 0; i < tokens->count; i++) {
        model_token *token = &s->tokens[s->extended + i];
        *token = (model_token){.id = ids[i], .known = tokens->ids != NULL};
    }
}

static void renew_contents(model_sequence *s, int64_t from)
{
    for (int64_t i = from; i < s->extended; i++) {
        model_token *token = &s->tokens[i];
        uint64_t content = mixed(i > 0 ? s->tokens[i - 1].content : s->salt, (uint64_t)(uint32_t)token->id);
        if (token->key[0] || token->key[1])
            content = mixed(mixed(mixed(content, token->key[0]), token->key[1]), (uint64_t)token->place);
        token->content = content;
    }
}

/* Whether an extension must copy the last block of a group. */
static bool must_copy(const model *m, const model_sequence *s, int32_t group, int64_t count)
{
    int32_t slot = (int32_t)(s->extended % m->p.block_size);
    if (count == 0 || slot == 0)
        return false;
    int32_t last = s->table[group][s->count - 1];
    return holders_of(m, group, last) > 1 || slot < m->groups[group].copied_slots[last];
}

static bool fits(const model *m, const model_sequence *s, int64_t count)
{
    return s->extended + count <= (int64_t)m->p.max_blocks_per_seq * m->p.block_size;
}

static bool enough(const model *m, const model_sequence *s, int64_t count)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        int32_t more = blocks_for(m, s->extended + count) - s->count + must_copy(m, s, group, count);
        if (more > m->groups[group].num_free)
            return false;
    }
    return true;
}

bool model_can_extend(const model *m, int32_t seq, int64_t count)
{
    const model_sequence *s = &m->sequences[seq];
    return fits(m, s, count) && enough(m, s, count);
}

static void copy_on_write(model *m, model_sequence *s, int32_t group)
{
    model_group *g = &m->groups[group];
    int32_t last = s->table[group][s->count - 1], at = model_filler(m, group, last);
    int32_t from = at >= 0 ? g->copies[at].src : last;
    int32_t slots = (int32_t)(s->committed - (int64_t)(s->count - 1) * m->p.block_size);
    s->table[group][s->count - 1] = take(g);
    g->copies[g->num_copies++] = (kvleaf_block_copy){from, s->table[group][s->count - 1]};
    if (g->copied_slots[from] < slots)
        g->copied_slots[from] = slots;
    if (from == last || holders_of(m, group, last) == 0)
        free_if_unheld(m, group, last);
}

static void grow(model *m, model_sequence *s, int64_t count)
{
    int32_t entries = blocks_for(m, s->extended + count);
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        if (must_copy(m, s, group, count))
            copy_on_write(m, s, group);
        for (int32_t i = s->count; i < entries; i++)
            s->table[group][i] = take(&m->groups[group]);
    }
    s->count = entries;
}

kvleaf_status model_extend(model *m, int32_t seq, const kvleaf_tokens *tokens, const int32_t *ids, int64_t *cached)
{
    model_sequence *s = &m->sequences[seq];
    if (is_planned(s))
        return KVLEAF_BUSY;
    if (!fits(m, s, tokens->count))
        return KVLEAF_TOO_SMALL;
    if (!enough(m, s, tokens->count))
        return KVLEAF_NO_BLOCKS;
    grow(m, s, tokens->count);
    put_tokens(m, s, tokens, ids);
    s->extended += tokens->count;
    renew_contents(s, s->extended - tokens->count);
    *cached = 0;
    return KVLEAF_OK;
}

kvleaf_status model_fork(model *m, int32_t seq, int64_t pos, int32_t *child)
{
    const model_sequence *parent = &m->sequences[seq];
    int32_t at = unused(m);
    if (pos < 0 || pos > parent->committed || !window_is_there(m, parent, pos))
        return KVLEAF_INVALID;
    if (at < 0)
        return KVLEAF_TOO_SMALL;
    m->sequences[at] = *parent;
    m->sequences[at].committed = m->sequences[at].planned = m->sequences[at].extended = pos;
    m->sequences[at].count = blocks_for(m, pos);
    *child = at;
    return KVLEAF_OK;
}

kvleaf_status model_truncate(model *m, int32_t seq, int64_t length)
{
    model_sequence *s = &m->sequences[seq];
    if (is_planned(s))
        return KVLEAF_BUSY;
    if (length < 0 || length > s->extended || (length > 0 && !window_is_there(m, s, length)))
        return KVLEAF_INVALID;
    cut(m, s, length);
    return KVLEAF_OK;
}

kvleaf_status model_destroy(model *m, int32_t seq)
{
    model_sequence *s = &m->sequences[seq];
    if (is_planned(s))
        return KVLEAF_BUSY;
    cut(m, s, 0);
    s->live = false;
    return KVLEAF_OK;
}

static bool named_before(const int32_t *seqs, int32_t at)
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
        if (named_before(seqs, i))
            return KVLEAF_INVALID;
        if (is_planned(s))
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
        if (model_filler(m, group, s->table[group][s->committed / m->p.block_size]) >= 0)
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

/* Gives back what lies before the window of the next token. */
static void move_window(model *m, model_sequence *s)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        for (int32_t i = first_needed(m, group, s->committed) - 1; i >= 0; i--) {
            int32_t block = s->table[group][i];
            s->table[group][i] = MODEL_NO_BLOCK;
            lose(m, group, block);
        }
    }
}

kvleaf_status model_commit(model *m, const int32_t *seqs, const int32_t *accepted, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const model_sequence *s = &m->sequences[seqs[i]];
        int64_t most = s->planned - s->committed, taken = accepted ? accepted[i] : most;
        if (named_before(seqs, i) || !is_planned(s) || taken < 0 || taken > most)
            return KVLEAF_INVALID;
        if (taken > 0 && copy_is_pending(m, s))
            return KVLEAF_INVALID;
    }
    for (int32_t i = 0; i < n; i++) {
        model_sequence *s = &m->sequences[seqs[i]];
        int64_t reached = accepted ? s->committed + accepted[i] : s->planned;
        bool rejected = reached < s->planned;
        write_tokens(m, s);
        s->committed = s->planned = reached;
        if (rejected)
            cut(m, s, reached);
        move_window(m, s);
    }
    return KVLEAF_OK;
}

kvleaf_status model_rollback(model *m, const int32_t *seqs, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (named_before(seqs, i) || !is_planned(&m->sequences[seqs[i]]))
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
        int32_t at = model_filler(m, group, copies[i].dst);
        if (at < 0 || g->copies[at].src != copies[i].src)
            return false;
        memcpy(g->memory[copies[i].dst], before[copies[i].src], sizeof before[0]);
        end_copy(m, group, at);
    }
    g->copies_made += (uint64_t)count;
    return true;
}

uint64_t model_read(const model *m, int32_t group, int32_t block, int64_t position)
{
    const model_group *g = &m->groups[group];
    int32_t at = model_filler(m, group, block);
    return g->memory[at >= 0 ? g->copies[at].src : block][position % m->p.block_size];
}

void model_count(const model *m, int32_t group, model_counts *counts)
{
    memset(counts, 0, sizeof *counts);
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        const model_sequence *s = &m->sequences[i];
        for (int32_t j = 0; s->live && j < s->count; j++) {
            int32_t block = s->table[group][j];
            int64_t here = s->extended - (int64_t)j * m->p.block_size;
            if (block == MODEL_NO_BLOCK)
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
    stats->free = g->num_free;
    stats->used = stats->total - g->num_free;
    for (int32_t block = 0; block < stats->total; block++) {
        bool held = counts->holders[block] > 0, pinned = !held && readers(g, block) > 0;
        stats->pinned += pinned;
        stats->slots_wasted += held || pinned ? m->p.block_size - counts->slots[block] : 0;
    }
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        stats->sequences += m->sequences[i].live;
        stats->tokens += m->sequences[i].live ? m->sequences[i].extended : 0;
    }
    stats->copies = g->copies_made;
}
