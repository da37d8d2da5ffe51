/* SPDX-License-Identifier: Apache-2.0 */
/* Records back into a manager: sequences that hold them, and the index that finds them. Whoever wrote what is saved may
 * have lied, so that everything is held against everything else before a block is taken. */
#include "blocks/index.h"
#include "blocks/saved.h"

#include <string.h>
#include <xxhash.h>

/* One call's view of its arguments. */
typedef struct loader {
    kvleaf_blocks *blocks;
    const kvl_saved *saved;
    kvl_load *load;
} loader;

static int32_t columns_of(const kvl_saved *saved, const kvl_saved_seq *seq)
{
    return (int32_t)kvl_ceil_div(seq->tokens, saved->block_size);
}

/* Of a sequence's column in a group. */
static int32_t record_of(const kvl_saved *saved, const kvl_saved_seq *seq, int32_t group, int32_t column)
{
    return column < 0 ? KVLEAF_NO_BLOCK : seq->records[(int64_t)group * columns_of(saved, seq) + column];
}

static kvleaf_status contradicts(const char *what, int32_t at)
{
    return kvl_fail(KVLEAF_CORRUPT, what, at, 0, "the saved %s %d contradicts the others", what, (int)at);
}

static kvleaf_status check_shape(const kvleaf_blocks *blocks, const kvl_saved *saved)
{
    if (saved->block_size != blocks->block_size)
        return kvl_fail(KVLEAF_FOREIGN, "block_size", saved->block_size, blocks->block_size,
                        "what was saved has blocks of %d tokens, here they have %d", (int)saved->block_size,
                        (int)blocks->block_size);
    if (saved->num_groups != blocks->num_groups)
        return kvl_fail(KVLEAF_FOREIGN, "num_groups", saved->num_groups, blocks->num_groups,
                        "what was saved has %d groups, here there are %d", (int)saved->num_groups,
                        (int)blocks->num_groups);
    for (int32_t i = 0; i < saved->num_groups; i++) {
        if (saved->windows[i] != blocks->groups[i].window)
            return kvl_fail(KVLEAF_FOREIGN, "window", saved->windows[i], blocks->groups[i].window,
                            "group %d was saved with window %d, here it has %d", (int)i, (int)saved->windows[i],
                            (int)blocks->groups[i].window);
    }
    if (saved->num_seqs > blocks->max_sequences - blocks->live)
        return kvl_fail(KVLEAF_TOO_SMALL, "max_sequences", (int64_t)blocks->live + saved->num_seqs,
                        blocks->max_sequences, "%d sequences are live and %d are to be loaded, max_sequences is %d",
                        (int)blocks->live, (int)saved->num_seqs, (int)blocks->max_sequences);
    for (int32_t i = 0; i < saved->num_seqs; i++) {
        int32_t columns = columns_of(saved, &saved->seqs[i]);
        if (columns > blocks->max_blocks_per_seq)
            return kvl_fail(KVLEAF_TOO_SMALL, "max_blocks_per_seq", columns, blocks->max_blocks_per_seq,
                            "a saved sequence has %d blocks, here it may have %d", (int)columns,
                            (int)blocks->max_blocks_per_seq);
    }
    return KVLEAF_OK;
}

/* Whether what names a record agrees with what named it before: a block can only be what all say that it is. */
static bool name_record(kvl_load_record *record, const kvl_load_record *name)
{
    if (!record->named) {
        *record = *name;
        return true;
    }
    int32_t common = record->known < name->known ? record->known : name->known;
    bool chained = record->before[0] | record->before[1] && name->before[0] | name->before[1];
    if (record->column != name->column || record->salt != name->salt || (record->entered && name->entered) ||
        (chained && memcmp(record->before, name->before, sizeof record->before) != 0) ||
        memcmp(record->content->digest, name->content->digest, sizeof record->content->digest) != 0 ||
        (common > 0 && memcmp(record->ids, name->ids, (size_t)common * sizeof *name->ids) != 0))
        return false;
    if (!chained && name->before[0] | name->before[1])
        memcpy(record->before, name->before, sizeof record->before);
    if (record->known < name->known) {
        record->known = name->known;
        record->ids = name->ids;
    }
    record->entered |= name->entered;
    return true;
}

/* A chain of full blocks, by what they hold. */
typedef struct chain {
    uint64_t hash[2]; /* 0, 0: nothing yet, or not known */
    int32_t depth;
    bool known;
} chain;

static void lengthen(chain *c, uint64_t salt, const kvl_content *content, const int32_t *ids, int32_t count)
{
    XXH128_hash_t hash = XXH3_128bits(ids, (size_t)count * sizeof *ids);
    const uint64_t all[] = {c->hash[0],         c->hash[1], salt,       content->digest[0],
                            content->digest[1], hash.low64, hash.high64};
    hash = XXH3_128bits(all, sizeof all);
    c->hash[0] = hash.low64;
    c->hash[1] = hash.high64;
    c->depth++;
}

static bool all_known(const int32_t *ids, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        if (ids[i] == KVL_UNKNOWN)
            return false;
    return true;
}

static bool fits_terms(int32_t priority)
{
    return priority >= KVLEAF_PRIORITY_LOW && priority <= KVLEAF_PRIORITY_HIGH;
}

/* Names the records of one column, of which the sequence or entry knows `known` ids. */
static bool name_column(const loader *l, const chain *c, kvl_load_record name, const int32_t *records, int64_t stride)
{
    const kvl_saved *saved = l->saved;
    for (int32_t group = 0; group < saved->num_groups; group++) {
        int32_t number = records[group * stride];
        kvl_load_record of_group = name;
        if (number == KVLEAF_NO_BLOCK)
            continue;
        if (group == l->blocks->primary)
            memcpy(of_group.before, c->hash, sizeof of_group.before);
        else
            of_group.known = 0;
        if (!name_record(&l->load->records[group][number], &of_group))
            return false;
    }
    return true;
}

static bool name_seq(const loader *l, const kvl_saved_seq *seq)
{
    int32_t block_size = l->saved->block_size, columns = columns_of(l->saved, seq);
    chain c = {.known = true};
    if (!fits_terms(seq->priority) || (seq->no_prefix != 0 && seq->no_prefix != 1))
        return false;
    for (int32_t i = 0; i < columns; i++) {
        int64_t first = (int64_t)i * block_size, known = seq->known - first;
        kvl_load_record name = {
            .block = KVLEAF_NO_BLOCK,
            .wanted = true,
            .named = true,
            .column = i,
            .known = known < 0            ? 0
                     : known < block_size ? (int32_t)known
                                          : block_size,
            .salt = seq->salt,
            .ids = seq->ids + (known > 0 ? first : 0),
            .content = &seq->content[i],
        };
        bool here = record_of(l->saved, seq, l->blocks->primary, i) != KVLEAF_NO_BLOCK;
        if (here && !all_known(name.ids, name.known))
            return false;
        if (!name_column(l, &c, name, seq->records + i, columns))
            return false;
        c.known = c.known && here && known >= block_size;
        if (c.known)
            lengthen(&c, seq->salt, name.content, name.ids, block_size);
        else
            c.hash[0] = c.hash[1] = 0;
    }
    return true;
}

static bool name_entry(const loader *l, const kvl_saved_entry *entry, const kvl_saved_entry *parent, chain *c)
{
    kvl_load_record name = {
        .block = KVLEAF_NO_BLOCK,
        .wanted = l->blocks->index.entries != NULL,
        .named = true,
        .entered = true,
        .column = c->depth,
        .known = l->saved->block_size,
        .salt = entry->salt,
        .ids = entry->ids,
        .content = &entry->content,
    };
    if (!fits_terms(entry->priority) || entry->records[l->blocks->primary] == KVLEAF_NO_BLOCK ||
        !all_known(entry->ids, name.known) || (parent && parent->salt != entry->salt) ||
        !name_column(l, c, name, entry->records, 1))
        return false;
    lengthen(c, entry->salt, name.content, entry->ids, name.known);
    return true;
}

/* Names every record by all that is to hold it. */
static kvleaf_status name_all(const loader *l)
{
    const kvl_saved *saved = l->saved;
    const kvleaf_allocator *allocator = &l->blocks->allocator;
    chain *chains = kvl_alloc(allocator, (size_t)saved->num_entries, sizeof *chains);
    kvleaf_status status = chains ? KVLEAF_OK : kvl_fail_memory((size_t)saved->num_entries * sizeof *chains);
    for (int32_t i = 0; !status && i < saved->num_seqs; i++)
        if (!name_seq(l, &saved->seqs[i]))
            status = contradicts("sequence", i);
    for (int32_t i = 0; !status && i < saved->num_entries; i++) {
        int32_t parent = saved->entries[i].parent;
        if (parent != KVL_NO_ENTRY)
            chains[i] = chains[parent];
        if (!name_entry(l, &saved->entries[i], parent == KVL_NO_ENTRY ? NULL : &saved->entries[parent], &chains[i]))
            status = contradicts("index entry", i);
    }
    kvl_free(allocator, chains);
    return status;
}

/* Uses what an entry of the index holds for records that have no block yet. */
static void adopt(const loader *l, int32_t entry, const int32_t *records, int64_t stride)
{
    for (int32_t group = 0; group < l->saved->num_groups; group++) {
        int32_t number = records[group * stride];
        if (number != KVLEAF_NO_BLOCK && l->load->records[group][number].block == KVLEAF_NO_BLOCK)
            l->load->records[group][number].block = kvl_index_block(l->blocks, entry, group);
    }
}

static int32_t find(const loader *l, int32_t parent, uint64_t salt, const kvl_content *content, const int32_t *ids,
                    kvl_key *key)
{
    *key = (kvl_key){.parent = parent, .salt = salt, .content = content, .ids = ids};
    return kvl_index_find(l->blocks, key);
}

/* Finds the saved chains in the index as far as they are there. */
static void match_all(const loader *l)
{
    const kvl_saved *saved = l->saved;
    kvl_key key;
    for (int32_t i = 0; i < saved->num_entries; i++) {
        const kvl_saved_entry *entry = &saved->entries[i];
        int32_t parent = entry->parent == KVL_NO_ENTRY ? KVL_NO_ENTRY : l->load->entries[entry->parent];
        l->load->entries[i] = KVL_NO_ENTRY;
        if (parent != KVL_NO_ENTRY || entry->parent == KVL_NO_ENTRY)
            l->load->entries[i] = find(l, parent, entry->salt, &entry->content, entry->ids, &key);
        if (l->load->entries[i] != KVL_NO_ENTRY)
            adopt(l, l->load->entries[i], entry->records, 1);
    }
    for (int32_t i = 0; i < saved->num_seqs; i++) {
        const kvl_saved_seq *seq = &saved->seqs[i];
        int32_t columns = columns_of(saved, seq), entry = KVL_NO_ENTRY;
        int64_t full = (seq->known < seq->tokens ? seq->known : seq->tokens) / saved->block_size;
        for (int32_t j = 0; !seq->no_prefix && j < full; j++) {
            entry = find(l, entry, seq->salt, &seq->content[j], seq->ids + (int64_t)j * saved->block_size, &key);
            if (entry == KVL_NO_ENTRY)
                break;
            adopt(l, entry, seq->records + j, columns);
        }
    }
}

/* Blocks to be taken in a group, and how many of those that could be are wanted as they are. */
static void count_group(const loader *l, int32_t group, int32_t *taken, int32_t *kept)
{
    kvl_block *blocks = l->blocks->groups[group].blocks;
    int32_t count = l->saved->num_records[group];
    const kvl_load_record *records = l->load->records[group];
    *taken = *kept = 0;
    for (int32_t i = 0; i < count; i++) {
        if (!records[i].wanted)
            continue;
        if (records[i].block == KVLEAF_NO_BLOCK) {
            ++*taken;
        } else if (blocks[records[i].block].next != KVL_UNLISTED) {
            *kept += blocks[records[i].block].tails == 0;
            blocks[records[i].block].tails = 1; /* counted */
        }
    }
    for (int32_t i = 0; i < count; i++)
        if (records[i].block != KVLEAF_NO_BLOCK)
            blocks[records[i].block].tails = 0;
}

/* Holds what the index has, where blocks will be evicted, or ends that. */
static void hold(const loader *l, int32_t group, int32_t count)
{
    for (int32_t i = 0; i < l->saved->num_records[group]; i++) {
        const kvl_load_record *record = &l->load->records[group][i];
        if (record->wanted && !record->fill && record->block != KVLEAF_NO_BLOCK)
            kvl_group_hold(l->blocks, group, record->block, count);
    }
}

static kvleaf_status check_available(const loader *l, int32_t taken[KVL_MAX_GROUPS])
{
    for (int32_t group = 0; group < l->saved->num_groups; group++) {
        const kvl_group *of = &l->blocks->groups[group];
        int32_t kept;
        count_group(l, group, &taken[group], &kept);
        int32_t available = kvl_group_available(of) - kept;
        if (taken[group] > available)
            return kvl_fail(KVLEAF_NO_BLOCKS, "blocks", taken[group], available,
                            "what was saved needs %d more blocks of group %d, %d are available", (int)taken[group],
                            (int)group, (int)available);
        l->load->held[group] = taken[group] > of->free.count;
    }
    return KVLEAF_OK;
}

static void take_all(const loader *l, const int32_t taken[KVL_MAX_GROUPS])
{
    for (int32_t group = 0; group < l->saved->num_groups; group++)
        if (l->load->held[group])
            hold(l, group, 1);
    for (int32_t group = 0; group < l->saved->num_groups; group++) {
        for (int32_t i = 0; taken[group] > 0 && i < l->saved->num_records[group]; i++) {
            kvl_load_record *record = &l->load->records[group][i];
            if (!record->wanted || record->block != KVLEAF_NO_BLOCK)
                continue;
            record->block = kvl_group_take(l->blocks, group);
            record->fill = true;
        }
    }
}

static kvleaf_status make_seqs(const loader *l, kvleaf_seq *seqs)
{
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; !status && i < l->saved->num_seqs; i++) {
        const kvl_saved_seq *saved = &l->saved->seqs[i];
        const kvleaf_seq_params params = {
            .struct_size = sizeof params,
            .user = saved->user,
            .salt = saved->salt,
            .priority = saved->priority,
            .no_prefix = saved->no_prefix,
            .ttl_ms = saved->ttl_ms,
        };
        kvl_sequence *sequence = NULL;
        status = kvleaf_blocks_seq_create(l->blocks, &params, &seqs[i]);
        if (status)
            break;
        l->load->num_seqs++;
        status = kvl_sequence_find(l->blocks, seqs[i], &sequence);
        if (!status)
            status = kvl_sequence_reserve(l->blocks, sequence, columns_of(l->saved, saved));
    }
    return status;
}

static void release_load(const loader *l)
{
    for (int32_t group = 0; group < l->saved->num_groups; group++)
        kvl_free(&l->blocks->allocator, l->load->records[group]);
    kvl_free(&l->blocks->allocator, l->load->entries);
    *l->load = (kvl_load){0};
}

static void undo_seqs(const loader *l, kvleaf_seq *seqs)
{
    while (l->load->num_seqs > 0)
        kvleaf_blocks_seq_destroy(l->blocks, &seqs[--l->load->num_seqs]);
}

static kvleaf_status allocate(const loader *l)
{
    const kvleaf_allocator *allocator = &l->blocks->allocator;
    l->load->entries = kvl_alloc(allocator, (size_t)l->saved->num_entries, sizeof *l->load->entries);
    if (!l->load->entries)
        return kvl_fail_memory((size_t)l->saved->num_entries * sizeof *l->load->entries);
    for (int32_t group = 0; group < l->saved->num_groups; group++) {
        size_t count = (size_t)l->saved->num_records[group];
        l->load->records[group] = kvl_alloc(allocator, count, sizeof *l->load->records[group]);
        if (!l->load->records[group])
            return kvl_fail_memory(count * sizeof *l->load->records[group]);
        for (size_t i = 0; i < count; i++)
            l->load->records[group][i].block = KVLEAF_NO_BLOCK;
    }
    return KVLEAF_OK;
}

kvleaf_status kvl_load_begin(kvleaf_blocks *blocks, const kvl_saved *saved, kvleaf_seq *seqs, kvl_load *out)
{
    const loader l = {.blocks = blocks, .saved = saved, .load = out};
    int32_t taken[KVL_MAX_GROUPS] = {0};
    *out = (kvl_load){0};
    kvleaf_status status = check_shape(blocks, saved);
    if (status)
        return status;
    status = allocate(&l);
    if (!status)
        status = name_all(&l);
    if (!status && blocks->index.entries)
        match_all(&l);
    if (!status)
        status = check_available(&l, taken);
    if (!status)
        status = make_seqs(&l, seqs);
    if (status) {
        undo_seqs(&l, seqs);
        release_load(&l);
        return status;
    }
    take_all(&l, taken);
    return KVLEAF_OK;
}

/* Notes what the tokens of the blocks that were taken are. */
static void note_tokens(const loader *l)
{
    kvleaf_blocks *blocks = l->blocks;
    for (int32_t i = 0; i < l->saved->num_records[blocks->primary]; i++) {
        const kvl_load_record *record = &l->load->records[blocks->primary][i];
        if (!record->fill)
            continue;
        int32_t *ids = kvl_block_ids(blocks, record->block);
        for (int32_t slot = 0; slot < blocks->block_size; slot++)
            ids[slot] = slot < record->known ? record->ids[slot] : KVL_UNKNOWN;
        blocks->contents[record->block] = *record->content;
    }
}

static void fill_seq(const loader *l, const kvl_saved_seq *saved, kvl_sequence *sequence)
{
    int32_t columns = columns_of(l->saved, saved);
    for (int32_t group = 0; group < l->saved->num_groups; group++) {
        int32_t *table = kvl_sequence_table(sequence, group);
        for (int32_t i = 0; i < columns; i++) {
            int32_t number = record_of(l->saved, saved, group, i);
            table[i] = number == KVLEAF_NO_BLOCK ? number : l->load->records[group][number].block;
            if (number == KVLEAF_NO_BLOCK)
                sequence->first_held[group] = i + 1;
            else
                kvl_group_refer(l->blocks, group, table[i]);
        }
    }
    sequence->count = columns;
    sequence->committed = sequence->planned = sequence->extended = saved->tokens;
    sequence->known = saved->known;
    l->blocks->tokens += saved->tokens;
    kvl_sequence_note_peak(l->blocks, sequence);
}

/* Enters what the index does not find yet, and lets entries know the blocks that they lack. */
static void enter_all(const loader *l)
{
    kvleaf_blocks *blocks = l->blocks;
    for (int32_t i = 0; i < l->saved->num_entries; i++) {
        const kvl_saved_entry *saved = &l->saved->entries[i];
        int32_t parent = saved->parent == KVL_NO_ENTRY ? KVL_NO_ENTRY : l->load->entries[saved->parent];
        int32_t block = l->load->records[blocks->primary][saved->records[blocks->primary]].block;
        kvl_key key;
        int32_t entry = find(l, parent, saved->salt, &saved->content, saved->ids, &key);
        if (entry == KVL_NO_ENTRY) {
            kvl_index_enter(blocks, block, &key);
            entry = block;
        }
        l->load->entries[i] = entry;
        for (int32_t group = 0; group < l->saved->num_groups; group++) {
            if (group == blocks->primary || saved->records[group] == KVLEAF_NO_BLOCK)
                continue;
            int32_t own = l->load->records[group][saved->records[group]].block;
            if (kvl_index_block(blocks, entry, group) == KVLEAF_NO_BLOCK &&
                blocks->groups[group].blocks[own].entry == KVL_NO_ENTRY)
                kvl_index_attach(blocks, entry, group, own);
        }
    }
}

/* Gives back the load's own reference to a block that it took. */
static void let_go(const loader *l, int32_t group, int32_t number, const kvleaf_seq_params *terms)
{
    kvl_load_record *record = &l->load->records[group][number];
    if (!record->fill)
        return;
    kvl_group_release(l->blocks, group, &record->block, 1, terms);
    record->fill = false;
}

/* What no sequence holds is cached from then on, or free: the deepest of a chain first. */
static void let_all_go(const loader *l)
{
    kvleaf_seq_params terms = {.struct_size = sizeof terms};
    for (int32_t i = l->saved->num_entries - 1; i >= 0; i--) {
        const kvl_saved_entry *entry = &l->saved->entries[i];
        terms.priority = entry->priority;
        terms.ttl_ms = entry->ttl_ms;
        for (int32_t group = 0; group < l->saved->num_groups; group++)
            if (entry->records[group] != KVLEAF_NO_BLOCK)
                let_go(l, group, entry->records[group], &terms);
    }
    terms = (kvleaf_seq_params){.struct_size = sizeof terms};
    for (int32_t group = 0; group < l->saved->num_groups; group++)
        for (int32_t i = l->saved->num_records[group] - 1; i >= 0; i--)
            let_go(l, group, i, &terms);
}

void kvl_load_end(kvleaf_blocks *blocks, const kvl_saved *saved, kvl_load *load, kvleaf_seq *seqs, bool done)
{
    const loader l = {.blocks = blocks, .saved = saved, .load = load};
    kvl_sequence *sequence = NULL;
    if (done) {
        note_tokens(&l);
        for (int32_t i = 0; i < saved->num_seqs; i++)
            if (kvl_sequence_find(blocks, seqs[i], &sequence) == KVLEAF_OK)
                fill_seq(&l, &saved->seqs[i], sequence);
        if (blocks->index.entries)
            enter_all(&l);
        for (int32_t i = 0; i < saved->num_seqs; i++)
            if (kvl_sequence_find(blocks, seqs[i], &sequence) == KVLEAF_OK)
                kvl_index_follow(blocks, sequence);
    } else {
        undo_seqs(&l, seqs);
    }
    for (int32_t group = 0; group < saved->num_groups; group++)
        if (load->held[group])
            hold(&l, group, -1);
    let_all_go(&l);
    release_load(&l);
}
