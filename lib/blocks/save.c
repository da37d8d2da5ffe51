/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences and the index as records, for a snapshot to hold. Nothing of the manager changes. */
#include "blocks/index.h"
#include "blocks/saved.h"

#include <stdlib.h>

/* An entry of the index and when it was entered. */
typedef struct entered {
    uint64_t serial;
    int32_t entry;
} entered;

/* Where the parts are put as they are found; they are measured first and then have their place. */
typedef struct writer {
    const kvleaf_blocks *blocks;
    kvl_save *save;
    int32_t *numbers[KVL_MAX_GROUPS]; /* of each block's record, KVLEAF_NO_BLOCK = none yet */
    int32_t num_records[KVL_MAX_GROUPS];
    int32_t *ints;
    kvl_content *contents;
    int32_t *entry_numbers;          /* of the entries of the index */
    entered *order;                  /* of the entries, to be saved as they were entered: parents first */
    const kvleaf_seq_params **terms; /* of a sequence that holds the block; NULL = none does */
} writer;

/* The number of a block's record; `tokens` of its slots hold what is wanted. */
static int32_t record(writer *w, int32_t group, int32_t block, int32_t tokens)
{
    if (block == KVLEAF_NO_BLOCK)
        return KVLEAF_NO_BLOCK;
    kvl_save *save = w->save;
    int32_t *number = &w->numbers[group][block];
    if (*number == KVLEAF_NO_BLOCK) {
        const kvl_group *from = &w->blocks->groups[group];
        int32_t copy = from->blocks[block].copy;
        *number = w->num_records[group]++;
        /* What a pending copy will fill still lies where that reads. */
        save->blocks[group][*number] = copy == KVL_NO_COPY ? block : from->copies[copy].src;
    }
    if (save->tokens[group][*number] < tokens)
        save->tokens[group][*number] = tokens;
    return *number;
}

static int32_t columns_of(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    return (int32_t)kvl_ceil_div(sequence->committed, blocks->block_size);
}

static int64_t known_of(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    int64_t known = kvl_tokens_known(blocks, sequence);
    return known < sequence->committed ? known : sequence->committed;
}

static void write_seq(writer *w, const kvl_sequence *sequence, kvl_saved_seq *out)
{
    const kvleaf_blocks *blocks = w->blocks;
    int32_t block_size = blocks->block_size, columns = columns_of(blocks, sequence);
    *out = (kvl_saved_seq){
        .user = sequence->params.user,
        .salt = sequence->params.salt,
        .ttl_ms = sequence->params.ttl_ms,
        .priority = sequence->params.priority,
        .no_prefix = sequence->params.no_prefix,
        .tokens = sequence->committed,
        .known = known_of(blocks, sequence),
        .ids = w->ints,
        .content = w->contents,
    };
    const int32_t *table = kvl_sequence_table(sequence, blocks->primary);
    for (int64_t i = 0; i < out->known; i++) {
        int32_t block = table[i / block_size];
        *w->ints++ = block == KVLEAF_NO_BLOCK ? KVL_UNKNOWN : kvl_block_ids(blocks, block)[i % block_size];
    }
    for (int32_t i = 0; i < columns; i++, w->contents++)
        if (table[i] != KVLEAF_NO_BLOCK)
            *w->contents = blocks->contents[table[i]];
    out->records = w->ints;
    for (int32_t group = 0; group < blocks->num_groups; group++) {
        table = kvl_sequence_table(sequence, group);
        for (int32_t i = 0; i < columns; i++) {
            int64_t behind = sequence->committed - (int64_t)i * block_size;
            *w->ints++ = record(w, group, table[i], behind < block_size ? (int32_t)behind : block_size);
        }
    }
}

/* On which terms an entry's block stays: those of a sequence that holds it, else its own. */
static void write_terms(const writer *w, int32_t entry, kvl_saved_entry *out)
{
    const kvl_block *block = &w->blocks->groups[w->blocks->primary].blocks[entry];
    const kvleaf_seq_params *terms = w->terms[entry];
    uint64_t now = kvl_blocks_now(w->blocks);
    out->priority = terms ? terms->priority : block->priority;
    out->ttl_ms = terms ? terms->ttl_ms : !block->expires ? 0 : block->expires > now ? block->expires - now : 1;
}

static void write_entry(writer *w, int32_t entry, int32_t number, kvl_saved_entry *out)
{
    const kvleaf_blocks *blocks = w->blocks;
    const kvl_entry *from = &blocks->index.entries[entry];
    w->entry_numbers[entry] = number;
    *out = (kvl_saved_entry){
        .salt = from->salt,
        .content = blocks->contents[entry],
        .parent = from->parent == KVL_NO_ENTRY ? KVL_NO_ENTRY : w->entry_numbers[from->parent],
        .ids = kvl_block_ids(blocks, entry),
        .records = w->ints,
    };
    for (int32_t group = 0; group < blocks->num_groups; group++)
        *w->ints++ = record(w, group, kvl_index_block(blocks, entry, group), blocks->block_size);
    write_terms(w, entry, out);
}

static void *part(writer *w, int at, uint64_t count, size_t size, kvleaf_status *status)
{
    if (*status)
        return NULL;
    w->save->parts[at] = kvl_alloc(&w->blocks->allocator, (size_t)count, size);
    if (!w->save->parts[at])
        *status = kvl_fail_memory((size_t)count * size);
    return w->save->parts[at];
}

/* Memory for everything, by the number of sequences, of index entries, of known tokens and of columns. */
static kvleaf_status measure(writer *w, const kvleaf_seq *seqs, int32_t n, bool prefix_cache)
{
    const kvleaf_blocks *blocks = w->blocks;
    kvl_saved *saved = &w->save->saved;
    kvleaf_status status = KVLEAF_OK;
    uint64_t known = 0, columns = 0, num_blocks = 0, groups = (uint64_t)blocks->num_groups;
    for (int32_t i = 0; i < n; i++) {
        kvl_sequence *sequence = NULL;
        status = kvl_sequence_find(blocks, seqs[i], &sequence);
        if (!status)
            status = kvl_sequence_check_resident(sequence, seqs[i]);
        if (status)
            return status;
        known += (uint64_t)known_of(blocks, sequence);
        columns += (uint64_t)columns_of(blocks, sequence);
    }
    const kvl_group *primary = &blocks->groups[blocks->primary];
    for (int32_t i = 0; i < blocks->num_groups; i++)
        num_blocks += (uint64_t)blocks->groups[i].num_blocks;
    saved->block_size = blocks->block_size;
    saved->num_groups = blocks->num_groups;
    saved->num_seqs = n;
    saved->num_entries = prefix_cache ? primary->indexed : 0;
    uint64_t entries = (uint64_t)saved->num_entries;
    saved->seqs = part(w, 0, (uint64_t)n, sizeof *saved->seqs, &status);
    saved->entries = part(w, 1, entries, sizeof *saved->entries, &status);
    w->ints = part(w, 2, known + groups * (columns + entries), sizeof *w->ints, &status);
    w->contents = part(w, 3, columns, sizeof *w->contents, &status);
    saved->windows = part(w, 4, 2 * groups, sizeof *saved->windows, &status);
    int32_t *lists = part(w, 5, 3 * num_blocks, sizeof *lists, &status);
    w->entry_numbers = part(w, 6, (uint64_t)primary->num_blocks, sizeof *w->entry_numbers, &status);
    w->terms = part(w, 7, (uint64_t)primary->num_blocks, sizeof *w->terms, &status);
    w->order = part(w, 8, entries, sizeof *w->order, &status);
    for (int32_t i = 0; !status && i < blocks->num_groups; i++) {
        int32_t **const parts[] = {&w->numbers[i], &w->save->blocks[i], &w->save->tokens[i]};
        for (size_t j = 0; j < sizeof parts / sizeof *parts; j++, lists += blocks->groups[i].num_blocks)
            *parts[j] = lists;
        for (int32_t j = 0; j < blocks->groups[i].num_blocks; j++)
            w->numbers[i][j] = KVLEAF_NO_BLOCK;
    }
    return status;
}

/* Whose blocks the primary group's are. */
static void note_terms(writer *w)
{
    const kvleaf_blocks *blocks = w->blocks;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        const int32_t *table = kvl_sequence_table(sequence, blocks->primary);
        bool resident = sequence->next_unused == KVL_UNLISTED && sequence->residence == KVL_RESIDENT;
        for (int32_t j = 0; resident && j < sequence->count; j++)
            if (table[j] != KVLEAF_NO_BLOCK)
                w->terms[table[j]] = &sequence->params;
    }
}

static int by_serial(const void *a, const void *b)
{
    uint64_t left = ((const entered *)a)->serial, right = ((const entered *)b)->serial;
    return (left > right) - (left < right);
}

static void write_index(writer *w, kvl_saved_entry *out)
{
    int32_t count = 0;
    for (int32_t entry = KVL_NO_ENTRY; (entry = kvl_index_next(w->blocks, entry)) != KVL_NO_ENTRY;)
        w->order[count++] = (entered){.serial = w->blocks->index.entries[entry].serial, .entry = entry};
    qsort(w->order, (size_t)count, sizeof *w->order, by_serial);
    note_terms(w);
    for (int32_t i = 0; i < count; i++)
        write_entry(w, w->order[i].entry, i, &out[i]);
}

kvleaf_status kvl_save_begin(const kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t n, bool prefix_cache,
                             kvl_save *out)
{
    writer w = {.blocks = blocks, .save = out};
    *out = (kvl_save){0};
    kvleaf_status status = measure(&w, seqs, n, prefix_cache);
    if (status) {
        kvl_save_free(blocks, out);
        return status;
    }
    for (int32_t i = 0; i < n; i++) {
        kvl_sequence *sequence = NULL;
        if (kvl_sequence_find(blocks, seqs[i], &sequence) == KVLEAF_OK)
            write_seq(&w, sequence, (kvl_saved_seq *)out->parts[0] + i);
    }
    if (prefix_cache)
        write_index(&w, out->parts[1]);
    int32_t *counts = out->parts[4];
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        counts[i] = blocks->groups[i].window;
        counts[blocks->num_groups + i] = w.num_records[i];
    }
    out->saved.num_records = counts + blocks->num_groups;
    return KVLEAF_OK;
}

void kvl_save_free(const kvleaf_blocks *blocks, kvl_save *save)
{
    for (size_t i = 0; i < sizeof save->parts / sizeof *save->parts; i++)
        kvl_free(&blocks->allocator, save->parts[i]);
    *save = (kvl_save){0};
}
