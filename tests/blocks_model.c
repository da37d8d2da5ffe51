/* SPDX-License-Identifier: Apache-2.0 */
/* The model's sequences. */
#include "blocks_model.h"

#include <string.h>

static uint64_t mixed(uint64_t before, uint64_t with)
{
    uint64_t bits = (before ^ with) + 0x9e3779b97f4a7c15u;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u; /* the finaliser of splitmix64 */
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

int32_t model_blocks_for(const model *m, int64_t tokens)
{
    return (int32_t)((tokens + m->p.block_size - 1) / m->p.block_size);
}

int32_t model_holders(const model *m, int32_t group, int32_t block)
{
    int32_t count = 0;
    for (int32_t i = 0; i < 2 * MODEL_SEQUENCES; i++)
        for (int32_t j = 0; m->sequences[i].live && !m->sequences[i].swapped && j < m->sequences[i].count; j++)
            count += m->sequences[i].table[group][j] == block;
    return count;
}

int32_t model_first_needed(const model *m, int32_t group, int64_t position)
{
    int32_t window = m->p.groups[group].window;
    return window == 0 || position < window ? 0 : (int32_t)((position - window + 1) / m->p.block_size);
}

int64_t model_known(const model_sequence *s)
{
    int64_t known = 0;
    while (known < s->extended && s->tokens[known].known)
        known++;
    return known;
}

/* The index is about the first group without a window, else about the one with the largest. */
static int32_t primary_of(const model_params *params)
{
    int32_t primary = 0;
    for (int32_t i = 0; i < params->num_groups; i++) {
        if (params->groups[i].window == 0)
            return i;
        if (params->groups[i].window > params->groups[primary].window)
            primary = i;
    }
    return primary;
}

void model_init(model *m, const model_params *params)
{
    memset(m, 0, sizeof *m);
    m->p = *params;
    m->primary = primary_of(params);
    for (int32_t i = 0; i < params->num_groups; i++) {
        memcpy(m->groups[i].free.blocks, params->groups[i].free_order, sizeof m->groups[i].free.blocks);
        m->groups[i].free.count = params->groups[i].num_blocks;
    }
}

void model_note_peak(const model *m, model_sequence *s)
{
    int32_t held = 0;
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int32_t i = 0; i < s->count; i++)
            held += s->table[group][i] != MODEL_NONE;
    s->peak = held > s->peak ? held : s->peak;
}

void model_cut(model *m, model_sequence *s, int64_t length)
{
    int32_t keep = model_blocks_for(m, length);
    model_shorten(m, s, (int32_t)(length / m->p.block_size));
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        for (int32_t i = s->count - 1; i >= keep; i--) {
            int32_t block = s->table[group][i];
            s->table[group][i] = MODEL_NONE;
            model_lose(m, group, block, &s->terms);
        }
    }
    s->count = keep;
    s->extended = length;
    s->committed = s->committed > length ? length : s->committed;
    s->planned = s->committed;
    s->outdated = s->outdated && length > 0;
}

/* Whether a sequence of these first `length` tokens could go on. */
static bool window_is_there(const model *m, const model_sequence *s, int64_t length)
{
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int32_t i = model_first_needed(m, group, length); i < model_blocks_for(m, length); i++)
            if (s->table[group][i] == MODEL_NONE)
                return false;
    return true;
}

bool model_is_planned(const model_sequence *s)
{
    return s->planned > s->committed;
}

static int32_t unused(const model *m)
{
    for (int32_t i = 0; i < m->p.max_sequences; i++)
        if (!m->sequences[i].live)
            return i;
    return MODEL_NONE;
}

static model_terms terms_of(const kvleaf_seq_params *params)
{
    return params ? (model_terms){params->salt, params->ttl_ms, params->priority, params->no_prefix} : (model_terms){0};
}

kvleaf_status model_create(model *m, const kvleaf_seq_params *params, int32_t *made)
{
    int32_t at = unused(m);
    if (at == MODEL_NONE)
        return KVLEAF_TOO_SMALL;
    model_sequence *s = &m->sequences[at];
    memset(s, 0, sizeof *s);
    s->live = true;
    s->user = params ? params->user : 0;
    s->terms = terms_of(params);
    s->tip = MODEL_NONE;
    *made = at;
    return KVLEAF_OK;
}

static uint64_t content_of(uint64_t before, const model_token *token)
{
    before = mixed(mixed(before, (uint64_t)(uint32_t)token->id), token->in_span);
    return mixed(mixed(before, token->key[0]), token->key[1]);
}

/* The tokens as they will stand behind those of a sequence. */
static void make_tokens(const model_sequence *s, const kvleaf_tokens *tokens, const int32_t *ids, model_token *out)
{
    uint64_t before = s->extended > 0 ? s->tokens[s->extended - 1].content : s->terms.salt;
    for (int64_t i = 0; i < tokens->count; i++) {
        out[i] = (model_token){.id = ids[i], .known = tokens->ids != NULL};
        for (int32_t j = 0; j < tokens->num_spans; j++) {
            const kvleaf_span *span = &tokens->spans[j];
            if (i < span->start || i >= span->start + span->count)
                continue;
            out[i].in_span = true;
            memcpy(out[i].key, span->key, sizeof out[i].key);
        }
        before = out[i].content = content_of(before, &out[i]);
    }
}

/* After a change of ids. */
static void renew_contents(model_sequence *s)
{
    uint64_t before = s->terms.salt;
    for (int64_t i = 0; i < s->extended; i++)
        before = s->tokens[i].content = content_of(before, &s->tokens[i]);
}

void model_say(model_said *said, int32_t slot, const uint64_t key[2])
{
    said->digest = mixed(mixed(mixed(said->digest, (uint64_t)slot + 1), key[0]), key[1]);
    said->end = slot + 1;
}

/* What spans say of the tokens `from` on, which are new in their slots. What was said of a slot that is written anew
 * stays, as a thing of the past, since the block is not what it seems to be. */
static void say_tokens(model *m, const model_sequence *s, int64_t from)
{
    const uint64_t past[2] = {UINT64_MAX, UINT64_MAX};
    for (int64_t i = from; i < s->extended; i++) {
        int32_t slot = (int32_t)(i % m->p.block_size);
        model_said *said = &m->said[s->table[m->primary][i / m->p.block_size]];
        if (slot == 0)
            *said = (model_said){0};
        else if (said->end > slot) {
            model_say(said, slot, past);
            said->end = slot;
        }
        if (s->tokens[i].in_span)
            model_say(said, slot, s->tokens[i].key);
        m->known[s->table[m->primary][i / m->p.block_size]][slot] = s->tokens[i].known;
    }
}

/* Gives back what lies before the windows of the next token. */
void model_move_windows(model *m, model_sequence *s)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        for (int32_t i = 0; i < model_first_needed(m, group, s->committed); i++) {
            int32_t block = s->table[group][i];
            s->table[group][i] = MODEL_NONE;
            model_lose(m, group, block, &s->terms);
        }
    }
}

/* Whether an extension must copy the last block of a group. */
static bool must_copy(const model *m, const model_sequence *s, int32_t group, int64_t count)
{
    int32_t slot = (int32_t)(s->extended % m->p.block_size);
    if (count == 0 || slot == 0)
        return false;
    int32_t last = s->table[group][s->count - 1];
    return model_holders(m, group, last) > 1 || slot < m->groups[group].copied_slots[last] ||
           (model_entry_of(m, group, last) != MODEL_NONE && model_is_pinned(m, group, last));
}

static bool fits(const model *m, const model_sequence *s, int64_t count)
{
    return s->extended + count <= (int64_t)m->p.max_blocks_per_seq * m->p.block_size;
}

static bool enough(const model *m, const model_sequence *s, int64_t count, const model_hit *hit)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        int32_t more = model_blocks_for(m, s->extended + count) - s->count + must_copy(m, s, group, count);
        if (more - hit->blocks > model_available(m, group, hit, s->committed))
            return false;
    }
    return true;
}

bool model_can_extend(const model *m, int32_t seq, int64_t count)
{
    const model_hit none = {.partial = MODEL_NONE};
    const model_sequence *s = &m->sequences[seq];
    return fits(m, s, count) && enough(m, s, count, &none);
}

static void add_copy(model_group *g, int32_t source, int32_t destination, int32_t slots)
{
    g->copies_src.blocks[g->copies_src.count++] = source;
    g->copies_dst.blocks[g->copies_dst.count++] = destination;
    if (g->copied_slots[source] < slots)
        g->copied_slots[source] = slots;
}

static void copy_on_write(model *m, model_sequence *s, int32_t group)
{
    model_group *g = &m->groups[group];
    int32_t last = s->table[group][s->count - 1], at = model_filler(g, last);
    int32_t from = at != MODEL_NONE ? g->copies_src.blocks[at] : last;
    int32_t slots = (int32_t)(s->committed - (int64_t)(s->count - 1) * m->p.block_size);
    int32_t taken = model_take(m, group);
    s->table[group][s->count - 1] = taken;
    if (group == m->primary) {
        m->said[taken] = m->said[last];
        memcpy(m->known[taken], m->known[last], sizeof m->known[taken]);
    }
    add_copy(g, from, taken, slots);
    model_lose(m, group, last, &s->terms);
}

/* Refers to the blocks of a hit. The partial one is held before anything is taken. */
static void use_hit(model *m, model_sequence *s, const model_hit *hit)
{
    int64_t reached = s->committed + (int64_t)hit->blocks * m->p.block_size + hit->partial_tokens;
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        for (int32_t i = 0; i < hit->blocks; i++) {
            int32_t at = s->count + i, block = m->entries[hit->chain[i]].block[group];
            s->table[group][at] = at < model_first_needed(m, group, reached) ? MODEL_NONE : block;
        }
    }
    s->count += hit->blocks;
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int32_t i = 0; i < hit->blocks; i++)
            if (s->table[group][s->count - 1 - i] != MODEL_NONE)
                model_refile(m, group, s->table[group][s->count - 1 - i]);
    if (hit->blocks) {
        s->indexed += hit->blocks;
        s->tip = hit->chain[hit->blocks - 1];
        s->serial = m->entries[s->tip].serial;
    }
}

/* Holds what a partial match is to be copied from, before anything is taken. */
static void hold_partial(model *m, const model_hit *hit)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        int32_t source = m->entries[hit->partial].block[group];
        add_copy(&m->groups[group], source, MODEL_NONE, hit->partial_tokens);
        model_refile(m, group, source);
    }
}

/* Takes blocks until there are so many; the first is the copy of the partial match, if there is one. */
static void take_blocks(model *m, model_sequence *s, int32_t count, bool partial)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        model_list *made = &m->groups[group].copies_dst;
        for (int32_t i = s->count; i < count; i++)
            s->table[group][i] = model_take(m, group);
        if (partial)
            made->blocks[made->count - 1] = s->table[group][s->count];
    }
    s->count = count;
}

/* The last block of each table is about to be written. */
static void open_last_blocks(model *m, model_sequence *s, int64_t count)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        if (must_copy(m, s, group, count))
            copy_on_write(m, s, group);
        else if (count > 0 && s->extended % m->p.block_size > 0) {
            model_leave_index(m, group, s->table[group][s->count - 1]);
            model_unlink(m, group, s->table[group][s->count - 1]);
        }
    }
}

kvleaf_status model_extend(model *m, int32_t seq, const kvleaf_tokens *tokens, const int32_t *ids, int64_t *cached)
{
    model_sequence *s = &m->sequences[seq];
    model_token added[MODEL_TOKENS];
    model_hit hit = {.partial = MODEL_NONE};
    if (model_is_planned(s) || s->swapped)
        return KVLEAF_BUSY;
    if (!fits(m, s, tokens->count))
        return KVLEAF_TOO_SMALL;
    make_tokens(s, tokens, ids, added);
    if (tokens->ids)
        hit = model_find(m, &s->terms, s, added, tokens->count);
    if (!enough(m, s, tokens->count, &hit)) /* the source of a partial match would have to stay */
        hit.partial_tokens = 0;
    if (!enough(m, s, tokens->count, &hit))
        return KVLEAF_NO_BLOCKS;
    memcpy(&s->tokens[s->extended], added, (size_t)tokens->count * sizeof *added);
    *cached = (int64_t)hit.blocks * m->p.block_size + hit.partial_tokens;
    int32_t entries = model_blocks_for(m, s->extended + tokens->count);
    open_last_blocks(m, s, tokens->count);
    use_hit(m, s, &hit);
    if (hit.partial_tokens)
        hold_partial(m, &hit);
    take_blocks(m, s, entries, hit.partial_tokens > 0);
    s->committed += *cached;
    s->planned = s->committed;
    s->cached += *cached;
    s->extended += tokens->count;
    if (*cached)
        model_move_windows(m, s);
    model_note_peak(m, s);
    say_tokens(m, s, s->extended - tokens->count + (int64_t)hit.blocks * m->p.block_size);
    if (tokens->ids) {
        m->looked_up += (uint64_t)tokens->count;
        m->hits += (uint64_t)*cached;
    }
    return KVLEAF_OK;
}

kvleaf_status model_fork(model *m, int32_t seq, int64_t pos, int32_t *child)
{
    const model_sequence *parent = &m->sequences[seq];
    int32_t at = unused(m);
    if (parent->swapped)
        return KVLEAF_BUSY;
    if (pos < 0 || pos > parent->committed || !window_is_there(m, parent, pos))
        return KVLEAF_INVALID;
    if (at == MODEL_NONE)
        return KVLEAF_TOO_SMALL;
    model_sequence *s = &m->sequences[at];
    *s = *parent;
    s->committed = s->planned = s->extended = pos;
    s->cached = 0;
    s->outdated = s->outdated && pos > 0;
    s->count = model_blocks_for(m, pos);
    s->peak = 0;
    model_shorten(m, s, (int32_t)(pos / m->p.block_size));
    model_note_peak(m, s);
    *child = at;
    return KVLEAF_OK;
}

kvleaf_status model_truncate(model *m, int32_t seq, int64_t length)
{
    model_sequence *s = &m->sequences[seq];
    if (model_is_planned(s) || s->swapped)
        return KVLEAF_BUSY;
    if (length < 0 || length > s->extended || (length > 0 && !window_is_there(m, s, length)))
        return KVLEAF_INVALID;
    model_cut(m, s, length);
    return KVLEAF_OK;
}

kvleaf_status model_destroy(model *m, int32_t seq)
{
    model_sequence *s = &m->sequences[seq];
    if (model_is_planned(s))
        return KVLEAF_BUSY;
    if (s->swapped)
        model_drop_hosts(m, s);
    model_cut(m, s, 0);
    s->live = false;
    return KVLEAF_OK;
}

/* An id stands with the block, so whoever shares it knows it too. */
static void tell_sharers(model *m, const model_sequence *s, int64_t token)
{
    int64_t at = token / m->p.block_size;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        model_sequence *other = &m->sequences[i];
        if (other->live && !other->swapped && token < other->extended &&
            other->table[m->primary][at] == s->table[m->primary][at])
            other->tokens[token].known = true;
    }
}

kvleaf_status model_set_ids(model *m, int32_t seq, int64_t start, const int32_t *ids, int64_t count)
{
    model_sequence *s = &m->sequences[seq];
    if (model_is_planned(s) || s->swapped)
        return KVLEAF_BUSY;
    if (start < 0 || count < 0 || start + count > s->extended)
        return KVLEAF_INVALID;
    for (int64_t i = start; i < start + count; i++)
        if (s->table[m->primary][i / m->p.block_size] == MODEL_NONE ||
            (i < s->committed && s->tokens[i].known && s->tokens[i].id != ids[i - start]))
            return KVLEAF_INVALID;
    for (int64_t i = start; i < start + count; i++) {
        s->tokens[i].id = ids[i - start];
        m->known[s->table[m->primary][i / m->p.block_size]][i % m->p.block_size] = true;
        tell_sharers(m, s, i);
    }
    renew_contents(s);
    model_follow(m, s);
    return KVLEAF_OK;
}

int64_t model_prefix_match(const model *m, const kvleaf_seq_params *params, const kvleaf_tokens *tokens)
{
    model_token made[MODEL_TOKENS];
    model_terms terms = terms_of(params);
    const model_sequence nothing = {.terms = terms};
    make_tokens(&nothing, tokens, tokens->ids, made);
    model_hit hit = model_find(m, &terms, NULL, made, tokens->count);
    return (int64_t)hit.blocks * m->p.block_size + hit.partial_tokens;
}
