/* SPDX-License-Identifier: Apache-2.0 */
/* The model's sequences on the move: dealt anew, to host memory and back. */
#include "blocks_model.h"

#include <string.h>

kvleaf_status model_rearrange(model *m, const int32_t *seqs, const int32_t *parents, int32_t n)
{
    model_sequence *before = &m->sequences[MODEL_SEQUENCES];
    for (int32_t i = 0; i < n; i++) {
        const model_sequence *s = &m->sequences[seqs[i]];
        if (model_named_before(seqs, i))
            return KVLEAF_INVALID;
        if (model_is_planned(s) || s->swapped)
            return KVLEAF_BUSY;
        if (parents[i] < 0 || parents[i] >= n || s->extended > s->committed)
            return KVLEAF_INVALID;
    }
    for (int32_t i = 0; i < n; i++)
        before[i] = m->sequences[seqs[i]];
    for (int32_t i = 0; i < n; i++) {
        m->sequences[seqs[i]] = before[parents[i]];
        m->sequences[seqs[i]].user = before[i].user;
    }
    for (int32_t i = 0; i < n; i++)
        if (parents[i] != i)
            model_cut(m, &before[i], 0);
    for (int32_t i = 0; i < n; i++)
        before[i].live = false;
    return KVLEAF_OK;
}

/* The host block that holds what a block does, or MODEL_NONE. */
static int32_t host_of(const model_group *g, int32_t block)
{
    for (int32_t i = 0; i < MODEL_HOSTS; i++)
        if (g->hosts[i].used && g->hosts[i].block == block)
            return i;
    return MODEL_NONE;
}

void model_unlink(model *m, int32_t group, int32_t block)
{
    int32_t host = host_of(&m->groups[group], block);
    if (host != MODEL_NONE)
        m->groups[group].hosts[host].block = MODEL_NONE;
}

int32_t model_hosts_used(const model *m, int32_t group)
{
    int32_t used = 0;
    for (int32_t i = 0; i < MODEL_HOSTS; i++)
        used += m->groups[group].hosts[i].used;
    return used;
}

/* Frees the host blocks that no swapped sequence refers to. */
static void sweep_hosts(model *m)
{
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        bool kept[MODEL_HOSTS] = {false};
        for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
            const model_sequence *s = &m->sequences[i];
            for (int32_t at = 0; s->live && s->swapped && at < s->count; at++)
                if (s->table[group][at] != MODEL_NONE)
                    kept[s->table[group][at]] = true;
        }
        for (int32_t i = 0; i < MODEL_HOSTS; i++)
            m->groups[group].hosts[i].used = m->groups[group].hosts[i].used && kept[i];
    }
}

void model_drop_hosts(model *m, model_sequence *s)
{
    s->swapped = false;
    s->count = 0; /* its entries are no blocks */
    sweep_hosts(m);
}

static bool has_tokens(const model *m, const model_sequence *s, int32_t at)
{
    return (int64_t)at * m->p.block_size < s->committed;
}

kvleaf_status model_swap_out_status(const model *m, int32_t seq)
{
    const model_sequence *s = &m->sequences[seq];
    if (model_is_planned(s))
        return KVLEAF_BUSY;
    if (s->swapped)
        return KVLEAF_INVALID;
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int32_t at = 0; at < s->count; at++)
            if (s->table[group][at] != MODEL_NONE && model_filler(&m->groups[group], s->table[group][at]) != MODEL_NONE)
                return KVLEAF_BUSY;
    for (int32_t group = 0; group < m->p.num_groups; group++) {
        int32_t needed = 0, there = m->p.groups[group].swap_blocks;
        for (int32_t at = 0; at < s->count; at++)
            needed +=
                s->table[group][at] != MODEL_NONE && host_of(&m->groups[group], s->table[group][at]) == MODEL_NONE;
        if (needed > 0 && there == 0)
            return KVLEAF_UNSUPPORTED;
        if (needed > there - model_hosts_used(m, group))
            return KVLEAF_NO_BLOCKS;
    }
    return KVLEAF_OK;
}

static const kvleaf_swap_copy *copy_of(const kvleaf_swap_copy *copies, int32_t count, int32_t group, int32_t block)
{
    for (int32_t i = 0; i < count; i++)
        if (copies[i].group == group && copies[i].block == block)
            return &copies[i];
    return NULL;
}

/* A host block for a block; `copy` as the manager listed it, NULL where there is nothing to copy. */
static int32_t take_host(model *m, int32_t group, int32_t block, const kvleaf_swap_copy *copy)
{
    model_group *g = &m->groups[group];
    int32_t at = 0;
    for (int32_t i = 0; copy && i < MODEL_HOSTS; i++)
        if (copy->host < 0 || copy->host >= m->p.groups[group].swap_blocks ||
            (g->hosts[i].used && g->hosts[i].number == copy->host))
            return MODEL_NONE;
    while (g->hosts[at].used)
        at++;
    g->hosts[at] = (model_host){.used = true, .block = block, .number = copy ? copy->host : MODEL_NONE};
    if (copy)
        memcpy(g->hosts[at].memory, g->memory[block], sizeof g->memory[block]);
    return at;
}

/* Leaves the blocks of a group, and refers to host blocks instead. */
static bool leave_group(model *m, model_sequence *s, int32_t group, const kvleaf_swap_copy *copies, int32_t count,
                        int32_t *listed)
{
    model_group *g = &m->groups[group];
    for (int32_t at = 0; at < s->count; at++) {
        int32_t block = s->table[group][at];
        if (block == MODEL_NONE || host_of(g, block) != MODEL_NONE)
            continue;
        const kvleaf_swap_copy *copy = has_tokens(m, s, at) ? copy_of(copies, count, group, block) : NULL;
        if ((has_tokens(m, s, at) && !copy) || take_host(m, group, block, copy) == MODEL_NONE)
            return false;
        *listed += copy != NULL;
    }
    return true;
}

bool model_swap_out(model *m, int32_t seq, const kvleaf_swap_copy *copies, int32_t count, bool done)
{
    model_sequence *s = &m->sequences[seq];
    int32_t listed = 0, blocks[MODEL_GROUPS][MODEL_BLOCKS];
    for (int32_t group = 0; group < m->p.num_groups; group++)
        if (!leave_group(m, s, group, copies, count, &listed))
            return false;
    for (int32_t group = 0; done && group < m->p.num_groups; group++) {
        model_group *g = &m->groups[group];
        for (int32_t at = 0; at < s->count; at++) {
            blocks[group][at] = s->table[group][at];
            if (blocks[group][at] == MODEL_NONE)
                continue;
            s->table[group][at] = host_of(g, blocks[group][at]);
            if (group == m->primary) {
                model_host *host = &g->hosts[s->table[group][at]];
                host->said = m->said[blocks[group][at]];
                memcpy(host->known, m->known[blocks[group][at]], sizeof host->known);
            }
        }
        for (int32_t i = 0; i < count; i++)
            g->swapped_out += copies[i].group == group;
    }
    s->swapped = done;
    for (int32_t group = 0; done && group < m->p.num_groups; group++)
        for (int32_t at = s->count - 1; at >= 0; at--)
            model_lose(m, group, blocks[group][at], &s->terms);
    sweep_hosts(m);
    return listed == count;
}

/* What an entry of a swapped sequence's table becomes. */
typedef struct returned {
    int32_t group, at, host, block;
    bool found;
} returned;

typedef struct return_list {
    returned entries[MODEL_GROUPS * MODEL_BLOCKS];
    int32_t count;
} return_list;

/* Leading blocks that the index may have. */
static int32_t indexed_blocks(const model *m, const model_sequence *s)
{
    int64_t known = model_known(s), ready = s->committed < known ? s->committed : known;
    if (m->p.no_prefix_cache || s->terms.no_prefix || s->outdated ||
        (s->count > 0 && s->table[m->primary][0] == MODEL_NONE))
        return 0;
    return (int32_t)(ready / m->p.block_size);
}

/* A block that holds the same is one that was copied from or to, or one that the index finds. */
static void list_returned(const model *m, const model_sequence *s, return_list *list)
{
    int32_t indexed = indexed_blocks(m, s), entry = MODEL_NONE;
    list->count = 0;
    for (int32_t at = 0; at < s->count; at++) {
        if (at < indexed && (at == 0 || entry != MODEL_NONE)) {
            int32_t host = s->table[m->primary][at];
            entry = model_find_entry(m, entry, s->terms.salt, &s->tokens[(int64_t)at * m->p.block_size],
                                     m->groups[m->primary].hosts[host].said.digest);
            entry = entry != MODEL_NONE && model_has_expired(m, m->primary, entry) ? MODEL_NONE : entry;
        } else {
            entry = MODEL_NONE;
        }
        for (int32_t group = 0; group < m->p.num_groups; group++) {
            int32_t host = s->table[group][at];
            if (host == MODEL_NONE)
                continue;
            int32_t block = m->groups[group].hosts[host].block;
            if (block == MODEL_NONE && entry != MODEL_NONE && m->entries[entry].block[group] != MODEL_NONE &&
                !model_has_expired(m, group, m->entries[entry].block[group]))
                block = m->entries[entry].block[group];
            list->entries[list->count++] = (returned){group, at, host, block, block != MODEL_NONE};
        }
    }
}

kvleaf_status model_swap_in_status(const model *m, int32_t seq)
{
    return_list list;
    int32_t needed[MODEL_GROUPS] = {0};
    if (model_is_planned(&m->sequences[seq]))
        return KVLEAF_BUSY;
    if (!m->sequences[seq].swapped)
        return KVLEAF_INVALID;
    list_returned(m, &m->sequences[seq], &list);
    for (int32_t i = 0; i < list.count; i++) {
        const returned *entry = &list.entries[i];
        needed[entry->group] += !entry->found || model_is_listed(m, entry->group, entry->block);
    }
    for (int32_t group = 0; group < m->p.num_groups; group++)
        if (needed[group] > m->groups[group].free.count + m->groups[group].cached.count)
            return KVLEAF_NO_BLOCKS;
    return KVLEAF_OK;
}

/* The device copies one back. */
static bool bring_back(model *m, const returned *entry, const kvleaf_swap_copy *copies, int32_t count)
{
    model_group *g = &m->groups[entry->group];
    const kvleaf_swap_copy *copy = copy_of(copies, count, entry->group, entry->block);
    if (!copy || copy->host != g->hosts[entry->host].number)
        return false;
    memcpy(g->memory[entry->block], g->hosts[entry->host].memory, sizeof g->memory[entry->block]);
    return true;
}

static void settle_returned(model *m, model_sequence *s, const returned *entry)
{
    model_group *g = &m->groups[entry->group];
    model_host *host = &g->hosts[entry->host];
    if (entry->group == m->primary && !entry->found) {
        m->said[entry->block] = host->said;
        memcpy(m->known[entry->block], host->known, sizeof host->known);
    }
    for (int32_t slot = 0; entry->group == m->primary && slot < m->p.block_size; slot++) {
        int64_t token = (int64_t)entry->at * m->p.block_size + slot;
        if (token < s->extended)
            s->tokens[token].known = m->known[entry->block][slot];
    }
    if (host->block == MODEL_NONE && host_of(g, entry->block) == MODEL_NONE)
        host->block = entry->block;
}

bool model_swap_in(model *m, int32_t seq, const kvleaf_swap_copy *copies, int32_t count, bool done)
{
    static _Thread_local return_list list;
    model_sequence *s = &m->sequences[seq], swapped = *s;
    int32_t listed = 0;
    list_returned(m, s, &list);
    for (int32_t group = 0; group < m->p.num_groups; group++)
        for (int32_t at = 0; at < s->count; at++)
            s->table[group][at] = MODEL_NONE;
    s->swapped = false;
    for (int32_t i = 0; i < list.count; i++) {
        returned *entry = &list.entries[i];
        if (!entry->found)
            continue;
        s->table[entry->group][entry->at] = entry->block;
        model_refile(m, entry->group, entry->block);
    }
    for (int32_t i = 0; i < list.count; i++) {
        returned *entry = &list.entries[i];
        if (entry->found)
            continue;
        entry->block = s->table[entry->group][entry->at] = model_take(m, entry->group);
        if (!has_tokens(m, s, entry->at))
            continue;
        listed++;
        if (!bring_back(m, entry, copies, count))
            return false;
    }
    for (int32_t i = list.count - 1; !done && i >= 0; i--) {
        s->table[list.entries[i].group][list.entries[i].at] = MODEL_NONE;
        model_lose(m, list.entries[i].group, list.entries[i].block, &s->terms);
    }
    if (!done)
        *s = swapped;
    for (int32_t i = 0; done && i < list.count; i++)
        settle_returned(m, s, &list.entries[i]);
    for (int32_t i = 0; done && i < count; i++)
        m->groups[copies[i].group].swapped_in++;
    sweep_hosts(m);
    return listed == count;
}
