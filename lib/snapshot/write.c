/* SPDX-License-Identifier: Apache-2.0 */
/* The front of a snapshot from what it describes, and checksums. */
#include "snapshot/format.h"

#include <xxhash.h>

static void put64(kvl_text *out, uint64_t value)
{
    char bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (char)(value >> 8 * i);
    kvl_text_append(out, bytes, sizeof bytes);
}

static void put32(kvl_text *out, int32_t value)
{
    char bytes[4];
    for (int i = 0; i < 4; i++)
        bytes[i] = (char)((uint32_t)value >> 8 * i);
    kvl_text_append(out, bytes, sizeof bytes);
}

static void put_array(kvl_text *out, const int32_t *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        put32(out, values[i]);
    if (count % 2)
        put32(out, 0);
}

static void put_content(kvl_text *out, const kvl_content *content)
{
    put64(out, content->digest[0]);
    put64(out, content->digest[1]);
    put32(out, content->end);
    put32(out, 0);
}

static void put_seq(kvl_text *out, const kvl_saved *saved, const kvl_saved_seq *seq)
{
    int64_t columns = kvl_ceil_div(seq->tokens, saved->block_size);
    put64(out, seq->user);
    put64(out, seq->salt);
    put64(out, seq->ttl_ms);
    put64(out, (uint64_t)seq->tokens);
    put64(out, (uint64_t)seq->known);
    put32(out, seq->priority);
    put32(out, seq->no_prefix);
    put_array(out, seq->ids, seq->known);
    for (int64_t i = 0; i < columns; i++)
        put_content(out, &seq->content[i]);
    put_array(out, seq->records, saved->num_groups * columns);
}

static void put_entry(kvl_text *out, const kvl_saved *saved, const kvl_saved_entry *entry)
{
    put64(out, entry->salt);
    put64(out, entry->ttl_ms);
    put_content(out, &entry->content);
    put32(out, entry->parent);
    put32(out, entry->priority);
    put_array(out, entry->ids, saved->block_size);
    put_array(out, entry->records, saved->num_groups);
}

static void put_description(kvl_text *out, const kvl_snapshot *snapshot)
{
    const kvl_saved *saved = &snapshot->saved;
    const int32_t counts[] = {saved->block_size, saved->num_groups,  snapshot->num_layers,
                              saved->num_seqs,   saved->num_entries, 0};
    put_array(out, counts, 6);
    for (int32_t i = 0; i < saved->num_groups; i++) {
        const kvl_snapshot_group *g = &snapshot->groups[i];
        const int32_t fields[] = {g->num_layers, g->num_heads, g->num_kv_heads, g->head_dim_k,
                                  g->head_dim_v, g->dtype,     g->window,       g->reserved};
        put_array(out, fields, 8);
        put64(out, (uint64_t)g->token_bytes);
        put64(out, (uint64_t)g->num_records);
    }
    for (int32_t i = 0; i < snapshot->num_layers; i++) {
        const kvl_snapshot_layer *l = &snapshot->layers[i];
        const int32_t fields[] = {l->group, l->pool_layer, l->owns, l->softmax_scale};
        put_array(out, fields, 4);
    }
    for (int32_t i = 0; i < saved->num_seqs; i++)
        put_seq(out, saved, &saved->seqs[i]);
    for (int32_t i = 0; i < saved->num_entries; i++)
        put_entry(out, saved, &saved->entries[i]);
}

uint64_t kvl_snapshot_record_bytes(const kvl_snapshot *snapshot, int32_t group)
{
    return (uint64_t)snapshot->saved.block_size * (uint64_t)snapshot->groups[group].token_bytes;
}

bool kvl_snapshot_records_bytes(const kvl_snapshot *snapshot, uint64_t *out)
{
    uint64_t total = 0;
    bool fits = true;
    for (int32_t i = 0; fits && i < snapshot->saved.num_groups; i++) {
        const kvl_snapshot_group *g = &snapshot->groups[i];
        uint64_t record, all;
        fits = kvl_mul((uint64_t)snapshot->saved.block_size, (uint64_t)g->token_bytes, &record) &&
               kvl_add(record, KVL_SNAPSHOT_CHECKSUM, &record) && kvl_mul(record, (uint64_t)g->num_records, &all) &&
               kvl_add(total, all, &total);
    }
    *out = total;
    return fits;
}

static void put_checksum(unsigned char *bytes, XXH128_hash_t hash)
{
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(hash.low64 >> 8 * i);
        bytes[8 + i] = (unsigned char)(hash.high64 >> 8 * i);
    }
}

uint64_t kvl_snapshot_seal(const void *data, size_t size, unsigned char checksum[KVL_SNAPSHOT_CHECKSUM])
{
    XXH128_hash_t hash = XXH3_128bits(data, size);
    put_checksum(checksum, hash);
    return hash.low64;
}

void kvl_snapshot_checksum(const kvl_snapshot *snapshot, int32_t group, int32_t record, const void *data,
                           unsigned char checksum[KVL_SNAPSHOT_CHECKSUM])
{
    uint64_t number = (uint64_t)record;
    for (int32_t i = 0; i < group; i++)
        number += (uint64_t)snapshot->groups[i].num_records;
    put_checksum(checksum, XXH3_128bits_withSeed(data, (size_t)kvl_snapshot_record_bytes(snapshot, group),
                                                 snapshot->seed + number));
}

static void patch64(kvl_text *out, size_t at, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out->data[at + (size_t)i] = (char)(value >> 8 * i);
}

kvleaf_status kvl_snapshot_write_front(kvl_snapshot *snapshot, kvl_text *out)
{
    unsigned char checksum[KVL_SNAPSHOT_CHECKSUM];
    kvl_text_append(out, KVL_SNAPSHOT_MAGIC, 8);
    put32(out, KVL_SNAPSHOT_VERSION);
    put32(out, 0);
    put64(out, 0);
    put64(out, 0);
    put_description(out, snapshot);
    if (out->failed)
        return kvl_fail_memory(out->capacity);
    snapshot->front_bytes = out->size + KVL_SNAPSHOT_CHECKSUM;
    if (!kvl_snapshot_records_bytes(snapshot, &snapshot->bytes) ||
        !kvl_add(snapshot->bytes, snapshot->front_bytes, &snapshot->bytes))
        return kvl_fail(KVLEAF_UNSUPPORTED, "bytes", 0, 0, "the snapshot would take more bytes than 64 bits count");
    patch64(out, 16, snapshot->bytes);
    patch64(out, 24, out->size - KVL_SNAPSHOT_HEAD);
    snapshot->seed = kvl_snapshot_seal(out->data, out->size, checksum);
    kvl_text_append(out, (const char *)checksum, sizeof checksum);
    return out->failed ? kvl_fail_memory(out->capacity) : KVLEAF_OK;
}
