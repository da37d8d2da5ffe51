/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SNAPSHOT_SAMPLE_H
#define KVL_SNAPSHOT_SAMPLE_H

/* A small snapshot in memory: two groups (the second with a window of 3 tokens), blocks of 2 tokens, two sequences that
 * share their first two tokens, and two index entries. */

#include <stdlib.h>
#include <string.h>

#include "snapshot/format.h"

enum { SAMPLE_TOKENS_A = 5, SAMPLE_TOKENS_B = 3 };

static const int32_t sample_ids_a[SAMPLE_TOKENS_A] = {11, 12, 13, -14, 15},
                     sample_ids_b[SAMPLE_TOKENS_B] = {11, 12, 99};
static const kvl_content sample_content[3] = {{{0, 0}, 0}, {{7, 8}, 2}, {{0, 0}, 0}};
static const int32_t sample_records_a[] = {0, 1, 2, KVLEAF_NO_BLOCK, 0, 1};
static const int32_t sample_records_b[] = {0, 3, 2, 3};
static const int32_t sample_entry_0[] = {0, 2}, sample_entry_1[] = {1, KVLEAF_NO_BLOCK};
static const int32_t sample_windows[] = {0, 3}, sample_num_records[] = {4, 4};
static const kvl_snapshot_group sample_groups[] = {
    {.num_layers = 1,
     .num_heads = 1,
     .num_kv_heads = 1,
     .head_dim_k = 1,
     .head_dim_v = 1,
     .token_bytes = 4,
     .num_records = 4},
    {.num_layers = 1,
     .num_heads = 2,
     .num_kv_heads = 1,
     .head_dim_k = 2,
     .head_dim_v = 2,
     .window = 3,
     .token_bytes = 8,
     .num_records = 4},
};
static const kvl_snapshot_layer sample_layers[] = {
    {.group = 0, .owns = 1, .softmax_scale = 0x3f800000},
    {.group = 1, .owns = 1, .softmax_scale = 0x3f000000},
};
static const kvl_saved_seq sample_seqs[] = {
    {.user = 1,
     .salt = 2,
     .ttl_ms = 3,
     .priority = -1,
     .tokens = SAMPLE_TOKENS_A,
     .known = SAMPLE_TOKENS_A,
     .ids = sample_ids_a,
     .content = sample_content,
     .records = sample_records_a},
    {.user = UINT64_MAX,
     .no_prefix = 1,
     .tokens = SAMPLE_TOKENS_B,
     .known = SAMPLE_TOKENS_B,
     .ids = sample_ids_b,
     .content = sample_content,
     .records = sample_records_b},
};
static const kvl_saved_entry sample_entries[] = {
    {.salt = 2, .ttl_ms = 3, .parent = -1, .priority = -1, .ids = sample_ids_a, .records = sample_entry_0},
    {.salt = 2, .content = {{7, 8}, 2}, .parent = 0, .ids = sample_ids_a + 2, .records = sample_entry_1},
};

static inline kvl_snapshot sample_snapshot(void)
{
    return (kvl_snapshot){
        .saved = {.block_size = 2,
                  .num_groups = 2,
                  .num_seqs = 2,
                  .num_entries = 2,
                  .windows = sample_windows,
                  .num_records = sample_num_records,
                  .seqs = sample_seqs,
                  .entries = sample_entries},
        .num_layers = 2,
        .groups = sample_groups,
        .layers = sample_layers,
    };
}

/* The bytes of a snapshot whose record r of group g is full of the byte 16 * g + r; malloc'ed. */
static inline unsigned char *sample_bytes(kvl_snapshot *snapshot, size_t *size)
{
    kvl_text out = {0};
    unsigned char data[64], checksum[KVL_SNAPSHOT_CHECKSUM];
    if (kvl_snapshot_write_front(snapshot, &out) != KVLEAF_OK)
        abort();
    for (int32_t group = 0; group < snapshot->saved.num_groups; group++) {
        for (int32_t record = 0; record < snapshot->saved.num_records[group]; record++) {
            size_t bytes = (size_t)kvl_snapshot_record_bytes(snapshot, group);
            memset(data, 16 * group + record, sizeof data);
            kvl_snapshot_checksum(snapshot, group, record, data, checksum);
            kvl_text_append(&out, (const char *)data, bytes);
            kvl_text_append(&out, (const char *)checksum, sizeof checksum);
        }
    }
    *size = out.size;
    return (unsigned char *)out.data;
}

/* A source over memory. */
typedef struct memory_source {
    const unsigned char *data;
    size_t size;
} memory_source;

static inline bool memory_read(void *user, uint64_t offset, void *data, size_t size)
{
    const memory_source *memory = user;
    if (offset > memory->size || size > memory->size - offset)
        return false;
    memcpy(data, memory->data + offset, size);
    return true;
}

static inline kvl_snapshot_source memory_source_of(memory_source *memory)
{
    return (kvl_snapshot_source){.read = memory_read, .user = memory, .size = memory->size};
}

#endif
