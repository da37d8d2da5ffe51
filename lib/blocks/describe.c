/* SPDX-License-Identifier: Apache-2.0 */
/* The block map for people, as text; describe_svg.c draws it. */
#include "blocks/describe.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LETTERS = 26, ROW_BLOCKS = 100, PART_BLOCKS = 10, TABLE_COLUMNS = 100 };

void kvl_picture_put(kvl_picture *picture, const char *format, ...)
{
    size_t room = picture->size < picture->capacity ? picture->capacity - picture->size : 0;
    va_list args;
    va_start(args, format);
    int size = vsnprintf(room ? picture->buffer + picture->size : NULL, room, format, args);
    va_end(args);
    if (size > 0)
        picture->size += (size_t)size;
}

static void look_at_group(kvl_picture *picture, int32_t group)
{
    const kvl_group *from = &picture->blocks->groups[group];
    for (int32_t i = 0; i < from->num_blocks; i++) {
        const kvl_block *block = &from->blocks[i];
        kvl_look *look = &picture->looks[group][i];
        look->state = block->references > 0          ? KVL_BLOCK_USED
                      : kvl_block_held(block)        ? KVL_BLOCK_PINNED
                      : block->next == KVL_UNLISTED  ? KVL_BLOCK_WITHHELD
                      : block->entry != KVL_NO_ENTRY ? KVL_BLOCK_CACHED
                                                     : KVL_BLOCK_FREE;
        picture->shared[group] += block->references > 1;
    }
}

static void look_at_sequence(kvl_picture *picture, int32_t group, const kvl_sequence *sequence)
{
    const int32_t *table = kvl_sequence_table(sequence, group), block_size = picture->blocks->block_size;
    int32_t count = sequence->residence == KVL_SWAPPED ? 0 : sequence->count;
    for (int32_t i = 0; i < count; i++) {
        if (table[i] == KVLEAF_NO_BLOCK)
            continue;
        kvl_look *look = &picture->looks[group][table[i]];
        int64_t behind = sequence->extended - (int64_t)i * block_size;
        int32_t tokens = behind < block_size ? (int32_t)behind : block_size;
        look->tokens = tokens > look->tokens ? tokens : look->tokens;
        if (look->references < KVL_LOOK_HOLDERS)
            look->holders[look->references] = kvl_sequence_slot(picture->blocks, sequence);
        look->references++;
    }
}

static kvleaf_status look(kvl_picture *picture)
{
    const kvleaf_blocks *blocks = picture->blocks;
    for (int32_t group = 0; group < blocks->num_groups; group++) {
        size_t count = (size_t)blocks->groups[group].num_blocks;
        picture->looks[group] = kvl_alloc(&blocks->allocator, count, sizeof *picture->looks[group]);
        if (!picture->looks[group])
            return kvl_fail_memory(count * sizeof *picture->looks[group]);
        picture->stats[group].struct_size = sizeof picture->stats[group];
        kvleaf_status status = kvleaf_blocks_query_group(blocks, group, &picture->stats[group]);
        if (status)
            return status;
        look_at_group(picture, group);
        for (int32_t i = 0; i < blocks->max_sequences; i++) {
            if (blocks->sequences[i].next_unused == KVL_UNLISTED)
                look_at_sequence(picture, group, &blocks->sequences[i]);
        }
    }
    return KVLEAF_OK;
}

static char sequence_letter(int32_t slot)
{
    return (char)('A' + slot % LETTERS);
}

static char letter(const kvl_look *look)
{
    switch (look->state) {
    case KVL_BLOCK_FREE:
        return '.';
    case KVL_BLOCK_CACHED:
        return 'c';
    case KVL_BLOCK_PINNED:
        return 'p';
    case KVL_BLOCK_WITHHELD:
        return '-';
    default:
        return look->references == 1   ? sequence_letter(look->holders[0])
               : look->references < 10 ? (char)('0' + look->references)
                                       : '+';
    }
}

/* A row of the map; returns whether it says the same as the row before. */
static bool make_row(const kvl_look *looks, int32_t count, char row[ROW_BLOCKS + ROW_BLOCKS / PART_BLOCKS + 1])
{
    char made[ROW_BLOCKS + ROW_BLOCKS / PART_BLOCKS + 1];
    int size = 0;
    for (int32_t i = 0; i < count; i++) {
        if (i > 0 && i % PART_BLOCKS == 0)
            made[size++] = ' ';
        made[size++] = letter(&looks[i]);
    }
    made[size++] = 0;
    bool same = strcmp(made, row) == 0;
    memcpy(row, made, (size_t)size);
    return same;
}

static void put_map(kvl_picture *picture, int32_t group)
{
    char row[ROW_BLOCKS + ROW_BLOCKS / PART_BLOCKS + 1] = "";
    int32_t num_blocks = picture->blocks->groups[group].num_blocks;
    bool left_out = false;
    for (int32_t first = 0; first < num_blocks; first += ROW_BLOCKS) {
        int32_t count = num_blocks - first < ROW_BLOCKS ? num_blocks - first : ROW_BLOCKS;
        bool same = make_row(&picture->looks[group][first], count, row) && first + count < num_blocks;
        if (!same)
            kvl_picture_put(picture, "%8d  %s\n", first, row);
        else if (!left_out)
            kvl_picture_put(picture, "       *\n");
        left_out = same;
        if (first > INT32_MAX - ROW_BLOCKS)
            break;
    }
}

/* Ids, runs of ids as first-last, and how many entries left the window, in lines of their own. */
static void put_table(kvl_picture *picture, const int32_t *table, int32_t count)
{
    int width = 0;
    for (int32_t i = 0, next; i < count; i = next) {
        char word[32];
        bool gone = table[i] == KVLEAF_NO_BLOCK;
        for (next = i + 1; next < count && table[next] == (gone ? KVLEAF_NO_BLOCK : table[i] + (next - i));)
            next++;
        int size = gone           ? snprintf(word, sizeof word, "(%d gone)", next - i)
                   : next > i + 1 ? snprintf(word, sizeof word, "%d-%d", table[i], table[next - 1])
                                  : snprintf(word, sizeof word, "%d", table[i]);
        bool breaks = width > 0 && width + 1 + size > TABLE_COLUMNS;
        kvl_picture_put(picture, "%s%s", breaks ? "\n          " : i == 0 ? "          " : " ", word);
        width = breaks ? size : width + 1 + size;
    }
    if (count > 0)
        kvl_picture_put(picture, "\n");
}

static void put_sequence(kvl_picture *picture, const kvl_sequence *sequence)
{
    const kvleaf_blocks *blocks = picture->blocks;
    int32_t slot = kvl_sequence_slot(blocks, sequence);
    bool swapped = sequence->residence == KVL_SWAPPED;
    kvl_picture_put(picture, "%c sequence %d: %lld tokens, %lld committed, user %llu%s\n", sequence_letter(slot), slot,
                    (long long)sequence->extended, (long long)sequence->committed,
                    (unsigned long long)sequence->params.user, swapped ? ", swapped out to host blocks" : "");
    for (int32_t group = 0; group < blocks->num_groups; group++)
        put_table(picture, kvl_sequence_table(sequence, group), sequence->count);
}

static void put_text(kvl_picture *picture)
{
    const kvleaf_blocks *blocks = picture->blocks;
    for (int32_t group = 0; group < blocks->num_groups; group++) {
        const kvleaf_blocks_stats *stats = &picture->stats[group];
        kvl_picture_put(picture,
                        "group %d: %d blocks of %d tokens: %d used (%d shared, %d pinned), %d cached, %d free; "
                        "%lld slots wasted",
                        group, stats->total, blocks->block_size, stats->used, picture->shared[group], stats->pinned,
                        stats->cached, stats->free, (long long)stats->slots_wasted);
        if (stats->host_total > 0)
            kvl_picture_put(picture, "; %d of %d host blocks used", stats->host_used, stats->host_total);
        kvl_picture_put(picture, "\n");
        put_map(picture, group);
    }
    kvl_picture_put(picture, "          . free   c cached   A-Z its sequence   2-9 + how many share it   p pinned   "
                             "- withheld   * as above\n");
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        if (blocks->sequences[i].next_unused == KVL_UNLISTED)
            put_sequence(picture, &blocks->sequences[i]);
    }
}

kvleaf_status kvleaf_blocks_describe(const kvleaf_blocks *blocks, kvleaf_format format, char *buffer, size_t capacity,
                                     size_t *size)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (!size)
        return kvl_fail_null("size");
    if (!buffer && capacity > 0)
        return kvl_fail_null("buffer");
    if (format != KVLEAF_FORMAT_TEXT && format != KVLEAF_FORMAT_SVG)
        return kvl_fail_range("format", format, KVLEAF_FORMAT_TEXT, KVLEAF_FORMAT_SVG);
    void (*const write)(kvl_picture *) = format == KVLEAF_FORMAT_SVG ? kvl_picture_svg : put_text;
    kvl_picture picture = {.blocks = blocks};
    kvleaf_status status = look(&picture);
    if (!status) {
        write(&picture);
        *size = picture.size + 1;
        if (*size > capacity)
            status = kvl_fail(KVLEAF_TOO_SMALL, "capacity", (int64_t)capacity, (int64_t)*size,
                              "capacity is %zu, the description takes %zu bytes", capacity, *size);
    }
    if (!status) {
        picture.buffer = buffer;
        picture.capacity = capacity;
        picture.size = 0;
        write(&picture);
    }
    for (int32_t group = 0; group < blocks->num_groups; group++)
        kvl_free(&blocks->allocator, picture.looks[group]);
    return status;
}
