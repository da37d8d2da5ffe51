/* SPDX-License-Identifier: Apache-2.0 */
/* The model's prefix index, and where a block is that no sequence refers to. */
#include "blocks_model.h"

#include <string.h>

static void append(model_list *list, int32_t block)
{
    list->blocks[list->count++] = block;
}

static int32_t place_in(const model_list *list, int32_t block)
{
    for (int32_t i = 0; i < list->count; i++)
        if (list->blocks[i] == block)
            return i;
    return MODEL_NONE;
}

static void remove_at(model_list *list, int32_t at)
{
    list->count--;
    memmove(&list->blocks[at], &list->blocks[at + 1], (size_t)(list->count - at) * sizeof *list->blocks);
}

static bool is_listed(const model_group *g, int32_t block)
{
    return place_in(&g->free, block) != MODEL_NONE || place_in(&g->cached, block) != MODEL_NONE;
}

bool model_is_listed(const model *m, int32_t group, int32_t block)
{
    return is_listed(&m->groups[group], block);
}

static void unlist(model_group *g, int32_t block)
{
    model_list *lists[] = {&g->free, &g->cached};
    for (int32_t i = 0; i < 2; i++)
        if (place_in(lists[i], block) != MODEL_NONE)
            remove_at(lists[i], place_in(lists[i], block));
}

int32_t model_entry_of(const model *m, int32_t group, int32_t block)
{
    for (int32_t i = 0; i < MODEL_BLOCKS; i++)
        if (m->entries[i].serial && m->entries[i].block[group] == block)
            return i;
    return MODEL_NONE;
}

/* Whether the entry `above` is `entry` or stands before it in its chain. */
static bool is_before(const model *m, int32_t above, int32_t entry)
{
    while (entry != MODEL_NONE && entry != above)
        entry = m->entries[entry].parent;
    return entry != MODEL_NONE;
}

/* Whether a pin holds the block: its own, or one of what is behind it in the index, which would go with it. */
bool model_is_pinned(const model *m, int32_t group, int32_t block)
{
    if (m->groups[group].pins[block])
        return true;
    if (group != m->primary || !m->entries[block].serial)
        return false;
    for (int32_t g = 0; g < m->p.num_groups; g++) {
        for (int32_t i = 0; i < m->p.groups[g].num_blocks; i++) {
            int32_t entry = m->groups[g].pins[i] ? model_entry_of(m, g, i) : MODEL_NONE;
            if (entry != MODEL_NONE && is_before(m, block, entry))
                return true;
        }
    }
    return false;
}

static bool is_read(const model_group *g, int32_t block)
{
    return place_in(&g->copies_src, block) != MODEL_NONE;
}

/* Behind all, but before the block that it continues. */
static void make_cached(model *m, int32_t group, int32_t block)
{
    model_group *g = &m->groups[group];
    int32_t parent = group == m->primary ? m->entries[block].parent : MODEL_NONE;
    int32_t at = parent == MODEL_NONE ? MODEL_NONE : place_in(&g->cached, parent);
    append(&g->cached, block);
    if (at == MODEL_NONE || g->priority[parent] != g->priority[block])
        return;
    memmove(&g->cached.blocks[at + 1], &g->cached.blocks[at],
            (size_t)(g->cached.count - 1 - at) * sizeof *g->cached.blocks);
    g->cached.blocks[at] = block;
}

void model_refile(model *m, int32_t group, int32_t block)
{
    model_group *g = &m->groups[group];
    bool held = model_holders(m, group, block) > 0 || is_read(g, block) || model_is_pinned(m, group, block);
    if (held)
        unlist(g, block);
    else if (!is_listed(g, block) && model_entry_of(m, group, block) == MODEL_NONE)
        append(&g->free, block);
    else if (!is_listed(g, block))
        make_cached(m, group, block);
}

/* The same for the chain that ends with an entry, last one first. */
static void refile_chain(model *m, int32_t entry)
{
    for (; entry != MODEL_NONE; entry = m->entries[entry].parent)
        model_refile(m, m->primary, entry);
}

int32_t model_filler(const model_group *g, int32_t block)
{
    return place_in(&g->copies_dst, block);
}

void model_end_copy(model *m, int32_t group, int32_t at)
{
    model_group *g = &m->groups[group];
    int32_t source = g->copies_src.blocks[at];
    remove_at(&g->copies_src, at);
    remove_at(&g->copies_dst, at);
    if (!is_read(g, source))
        g->copied_slots[source] = 0;
    model_refile(m, group, source);
}

void model_lose(model *m, int32_t group, int32_t block, const model_terms *terms)
{
    model_group *g = &m->groups[group];
    if (block == MODEL_NONE || model_holders(m, group, block) > 0)
        return;
    bool indexed = model_entry_of(m, group, block) != MODEL_NONE;
    g->priority[block] = terms->priority;
    g->expires[block] = indexed && terms->ttl_ms ? m->now_ms + terms->ttl_ms : 0;
    model_refile(m, group, block);
    if (model_filler(g, block) != MODEL_NONE)
        model_end_copy(m, group, model_filler(g, block));
}

bool model_has_expired(const model *m, int32_t group, int32_t block)
{
    const model_group *g = &m->groups[group];
    return place_in(&g->cached, block) != MODEL_NONE && g->expires[block] && g->expires[block] <= m->now_ms;
}

/* One block of an entry is found no more; a cached one becomes free. */
static void forget(model *m, int32_t entry, int32_t group)
{
    model_group *g = &m->groups[group];
    int32_t block = m->entries[entry].block[group];
    m->entries[entry].block[group] = MODEL_NONE;
    if (place_in(&g->cached, block) == MODEL_NONE)
        return;
    unlist(g, block);
    append(&g->free, block);
}

static int32_t latest_child(const model *m, int32_t entry)
{
    int32_t latest = MODEL_NONE;
    for (int32_t i = 0; i < MODEL_BLOCKS; i++)
        if (m->entries[i].serial && m->entries[i].parent == entry &&
            (latest == MODEL_NONE || m->entries[i].serial > m->entries[latest].serial))
            latest = i;
    return latest;
}

/* Takes an entry out, all behind it first. None of them is pinned: a pin holds all before it. */
static void leave(model *m, int32_t entry)
{
    while (latest_child(m, entry) != MODEL_NONE)
        leave(m, latest_child(m, entry));
    for (int32_t group = 0; group < m->p.num_groups; group++)
        if (m->entries[entry].block[group] != MODEL_NONE)
            forget(m, entry, group);
    m->entries[entry].serial = 0;
}

void model_leave_index(model *m, int32_t group, int32_t block)
{
    int32_t entry = model_entry_of(m, group, block);
    if (entry == MODEL_NONE)
        return;
    if (group == m->primary)
        leave(m, entry);
    else
        forget(m, entry, group);
}

/* Of the least recently used ones of each priority, an expired one, the highest first; else that of the lowest. */
static int32_t victim(const model *m, int32_t group)
{
    const model_group *g = &m->groups[group];
    int32_t lowest = MODEL_NONE, highest = MODEL_NONE;
    for (int32_t i = 0; i < g->cached.count; i++)
        highest = g->cached.blocks[i] > highest ? g->cached.blocks[i] : highest;
    if (m->p.policy && model_policy_knows(highest))
        return highest;
    for (int32_t priority = KVLEAF_PRIORITY_HIGH; priority >= KVLEAF_PRIORITY_LOW; priority--) {
        int32_t first = MODEL_NONE;
        for (int32_t i = g->cached.count - 1; i >= 0; i--)
            if (g->priority[g->cached.blocks[i]] == priority)
                first = g->cached.blocks[i];
        if (first != MODEL_NONE && model_has_expired(m, group, first))
            return first;
        lowest = first != MODEL_NONE ? first : lowest;
    }
    return lowest;
}

int32_t model_take(model *m, int32_t group)
{
    model_group *g = &m->groups[group];
    int32_t block = g->free.count > 0 ? g->free.blocks[0] : victim(m, group);
    g->evictions += g->free.count == 0;
    unlist(g, block);
    model_leave_index(m, group, block);
    model_unlink(m, group, block);
    return block;
}

/* How many of the ids an entry begins with. */
static int32_t common(const model *m, int32_t entry, const model_token *tokens, int64_t count)
{
    int32_t same = 0;
    while (same < m->p.block_size && same < count && m->entries[entry].ids[same] == tokens[same].id)
        same++;
    return same;
}

int32_t model_find_entry(const model *m, int32_t parent, uint64_t salt, const model_token *tokens, uint64_t digest)
{
    for (int32_t i = 0; i < MODEL_BLOCKS; i++)
        if (m->entries[i].serial && m->entries[i].parent == parent && m->entries[i].salt == salt &&
            m->entries[i].digest == digest && common(m, i, tokens, m->p.block_size) == m->p.block_size)
            return i;
    return MODEL_NONE;
}

/* What the spans of a whole block say. */
static uint64_t digest_of(const model *m, const model_token *tokens)
{
    model_said said = {0};
    for (int32_t i = 0; i < m->p.block_size; i++)
        if (tokens[i].in_span)
            model_say(&said, i, tokens[i].key);
    return said.digest;
}

static bool tip_is_there(const model *m, const model_sequence *s)
{
    return s->indexed == 0 || m->entries[s->tip].serial == s->serial;
}

void model_shorten(model *m, model_sequence *s, int32_t blocks)
{
    if (!tip_is_there(m, s))
        s->indexed = 0;
    for (; s->indexed > blocks; s->indexed--)
        s->tip = m->entries[s->tip].parent;
    if (s->indexed == 0)
        s->tip = MODEL_NONE;
    s->serial = s->indexed ? m->entries[s->tip].serial : 0;
}

/* Enters the sequence's next block, or finds it entered by another. */
static void follow_block(model *m, model_sequence *s)
{
    int32_t at = s->indexed, own = s->table[m->primary][at];
    const model_token *tokens = &s->tokens[(int64_t)at * m->p.block_size];
    uint64_t digest = m->said[own].digest;
    int32_t entry = model_find_entry(m, s->tip, s->terms.salt, tokens, digest);
    if (entry != MODEL_NONE && model_has_expired(m, m->primary, entry)) {
        leave(m, entry);
        entry = MODEL_NONE;
    }
    if (entry == MODEL_NONE) {
        entry = own;
        m->entries[own] =
            (model_entry){.serial = ++m->serial, .salt = s->terms.salt, .parent = s->tip, .digest = digest};
        for (int32_t i = 0; i < m->p.block_size; i++)
            m->entries[own].ids[i] = tokens[i].id;
        for (int32_t group = 0; group < m->p.num_groups; group++)
            m->entries[own].block[group] = group == m->primary ? own : MODEL_NONE;
    }
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        int32_t *there = &m->entries[entry].block[group], mine = s->table[group][at];
        if (mine == MODEL_NONE || group == m->primary || model_entry_of(m, group, mine) != MODEL_NONE)
            continue;
        if (*there != MODEL_NONE && model_has_expired(m, group, *there))
            model_leave_index(m, group, *there);
        if (*there == MODEL_NONE)
            *there = mine;
    }
    refile_chain(m, entry);
    s->indexed = at + 1;
    s->tip = entry;
    s->serial = m->entries[entry].serial;
}

void model_follow(model *m, model_sequence *s)
{
    int64_t known = model_known(s), ready = s->committed < known ? s->committed : known;
    int32_t full = (int32_t)(ready / m->p.block_size);
    if (m->p.no_prefix_cache || s->terms.no_prefix || s->outdated || s->indexed >= full)
        return;
    if (!tip_is_there(m, s))
        model_shorten(m, s, 0);
    while (s->indexed < full && s->table[m->primary][s->indexed] != MODEL_NONE)
        follow_block(m, s);
}

/* Whether a group has the blocks that the window of `position` needs: those of the sequence itself up to `depth`, then
 * the chain's. */
static bool group_has(const model *m, int32_t group, const model_hit *hit, int32_t depth, int64_t position)
{
    for (int32_t i = model_first_needed(m, group, position); i < depth + hit->blocks; i++) {
        int32_t block = i < depth ? 0 : m->entries[hit->chain[i - depth]].block[group];
        if (block == MODEL_NONE || (i >= depth && model_has_expired(m, group, block)))
            return false;
    }
    return true;
}

/* The longest match inside the next block, among the latest entries behind `parent`. */
static void find_partial(const model *m, const model_terms *terms, int32_t parent, const model_token *tokens,
                         int32_t most, model_hit *hit)
{
    uint64_t below = UINT64_MAX;
    hit->partial = MODEL_NONE;
    for (int32_t seen = 0; seen < MODEL_CHILDREN; seen++) {
        int32_t latest = MODEL_NONE;
        for (int32_t i = 0; i < MODEL_BLOCKS; i++) {
            const model_entry *entry = &m->entries[i];
            if (entry->serial && entry->parent == parent && entry->salt == terms->salt && entry->serial < below &&
                (latest == MODEL_NONE || entry->serial > m->entries[latest].serial))
                latest = i;
        }
        if (latest == MODEL_NONE)
            return;
        below = m->entries[latest].serial;
        bool whole = m->entries[latest].digest == 0;
        for (int32_t group = 0; group < m->p.num_groups; group++)
            whole = whole && m->entries[latest].block[group] != MODEL_NONE &&
                    !model_has_expired(m, group, m->entries[latest].block[group]);
        int32_t same = common(m, latest, tokens, most);
        if (whole && same > hit->partial_tokens) {
            hit->partial = latest;
            hit->partial_tokens = same;
        }
    }
}

model_hit model_find(const model *m, const model_terms *terms, const model_sequence *s, const model_token *tokens,
                     int64_t count)
{
    model_hit hit = {.partial = MODEL_NONE}, none = hit;
    int32_t size = m->p.block_size, depth = s ? (int32_t)(s->committed / size) : 0;
    if (m->p.no_prefix_cache || terms->no_prefix || count == 0)
        return none;
    if (s && (s->committed < s->extended || s->committed % size || model_known(s) < s->committed ||
              s->indexed < depth || !tip_is_there(m, s) || s->outdated))
        return none;
    int32_t parent = s && depth ? s->tip : MODEL_NONE;
    for (int64_t at = 0; at + size < count; at += size) {
        int32_t before = hit.blocks ? hit.chain[hit.blocks - 1] : parent;
        int32_t entry = model_find_entry(m, before, terms->salt, tokens + at, digest_of(m, tokens + at));
        if (entry == MODEL_NONE || model_has_expired(m, m->primary, entry))
            break;
        hit.chain[hit.blocks++] = entry;
    }
    for (; hit.blocks > 0; hit.blocks--) {
        bool all = true;
        for (int32_t group = 0; group < m->p.num_groups; group++)
            all = all && group_has(m, group, &hit, depth, (int64_t)(depth + hit.blocks) * size);
        if (all)
            break;
    }
    int64_t found = (int64_t)hit.blocks * size;
    int32_t most = 0;
    while (most < size && found + most < count - 1 && !tokens[found + most].in_span)
        most++;
    find_partial(m, terms, hit.blocks ? hit.chain[hit.blocks - 1] : parent, tokens + found, most, &hit);
    return hit;
}

int32_t model_available(const model *m, int32_t group, const model_hit *hit, int64_t start)
{
    const model_group *g = &m->groups[group];
    int32_t depth = (int32_t)(start / m->p.block_size), count = g->free.count + g->cached.count;
    int64_t reached = start + (int64_t)hit->blocks * m->p.block_size + hit->partial_tokens;
    for (int32_t i = model_first_needed(m, group, reached); i < depth + hit->blocks; i++)
        if (i >= depth)
            count -= place_in(&g->cached, m->entries[hit->chain[i - depth]].block[group]) != MODEL_NONE;
    if (hit->partial_tokens)
        count -= place_in(&g->cached, m->entries[hit->partial].block[group]) != MODEL_NONE;
    return count;
}

static bool can_be_pinned(const model *m, int32_t group, int32_t block)
{
    return place_in(&m->groups[group].free, block) == MODEL_NONE;
}

/* After the pins of a block have changed. */
static void refile_pinned(model *m, int32_t group, int32_t block)
{
    int32_t entry = model_entry_of(m, group, block);
    model_refile(m, group, block);
    if (entry != MODEL_NONE)
        refile_chain(m, group == m->primary ? m->entries[entry].parent : entry);
}

kvleaf_status model_pin(model *m, int32_t group, int32_t block)
{
    if (group < 0 || group >= m->p.num_groups || block < 0 || block >= m->p.groups[group].num_blocks ||
        !can_be_pinned(m, group, block))
        return KVLEAF_INVALID;
    m->groups[group].pins[block]++;
    refile_pinned(m, group, block);
    return KVLEAF_OK;
}

kvleaf_status model_unpin(model *m, int32_t group, int32_t block)
{
    if (group < 0 || group >= m->p.num_groups || block < 0 || block >= m->p.groups[group].num_blocks ||
        m->groups[group].pins[block] == 0)
        return KVLEAF_INVALID;
    m->groups[group].pins[block]--;
    refile_pinned(m, group, block);
    return KVLEAF_OK;
}

void model_prefix_clear(model *m)
{
    for (int32_t i = 0; i < MODEL_BLOCKS; i++)
        m->entries[i].serial = 0;
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        model_group *g = &m->groups[group];
        for (int32_t priority = KVLEAF_PRIORITY_LOW; priority <= KVLEAF_PRIORITY_HIGH; priority++)
            for (int32_t i = 0; i < g->cached.count; i++)
                if (g->priority[g->cached.blocks[i]] == priority)
                    append(&g->free, g->cached.blocks[i]);
        g->cached.count = 0;
        for (int32_t block = 0; block < m->p.groups[group].num_blocks; block++)
            model_refile(m, group, block);
    }
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        m->sequences[i].outdated = m->sequences[i].live && m->sequences[i].planned > 0;
}
