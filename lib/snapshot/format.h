/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SNAPSHOT_FORMAT_H
#define KVL_SNAPSHOT_FORMAT_H

/* The bytes of a snapshot. Host only.
 *
 *   front    head, 32 bytes: magic[8], u32 version, u32 0, u64 bytes of the file, u64 bytes of the description
 *            description
 *            checksum, 16 bytes, of all before it
 *   records  group by group: block_size * token_bytes bytes (K then V of each of the group's layers, each
 *            [block_size][num_kv_heads][head_dim] of the group's dtype; zeros where there is no token), then their
 *            checksum, 16 bytes
 *
 * Numbers are little-endian, arrays of int32 padded with a zero to 8 bytes. A checksum is an XXH3-128, low half first;
 * a record's is seeded by the front's (low half) plus the record's number in the file, so that a record of another
 * place or another file is told apart. Head and checksum of the front are the same in every version. The description:
 *
 *   i32 block_size, num_groups, num_layers, num_seqs, num_entries, 0
 *   a group   i32 num_layers, num_heads, num_kv_heads, head_dim_k, head_dim_v, dtype, window, reserved; i64
 * token_bytes, num_records a layer   i32 group, pool_layer, owns, bits of the float softmax_scale a sequence   u64
 * user, salt, ttl_ms; i64 tokens, known; i32 priority, no_prefix; i32 ids[known]; a content a column; i32
 * records[num_groups][columns] an entry  u64 salt, ttl_ms; a content; i32 parent, priority; i32 ids[block_size]; i32
 * records[num_groups] a content    u64 digest[2]; i32 end, 0
 *
 * A file can lie: every count is held against the bytes that are there before anything is allocated for it. */

#include "base/base.h"
#include "blocks/saved.h"

#define KVL_SNAPSHOT_MAGIC "kvleaf\x1a\n"

enum { KVL_SNAPSHOT_VERSION = 1, KVL_SNAPSHOT_HEAD = 32, KVL_SNAPSHOT_CHECKSUM = 16 };

/* Layers of one geometry and window; num_layers have K and V of their own. */
typedef struct kvl_snapshot_group {
    int32_t num_layers, num_heads, num_kv_heads, head_dim_k, head_dim_v, dtype, window;
    int32_t reserved;    /* 0 */
    int64_t token_bytes; /* K and V of a token in all layers of the group */
    int64_t num_records;
} kvl_snapshot_group;

typedef struct kvl_snapshot_layer {
    int32_t group;
    int32_t pool_layer, owns; /* whose K and V of the group it reads, and whether it writes them */
    int32_t softmax_scale;    /* the bits of the float */
} kvl_snapshot_layer;

/* What a file holds, its records apart. */
typedef struct kvl_snapshot {
    kvl_saved saved; /* windows and num_records stand in the groups, too */
    int32_t num_layers;
    const kvl_snapshot_group *groups; /* [saved.num_groups] */
    const kvl_snapshot_layer *layers; /* [num_layers] */
    uint64_t bytes;                   /* of the file */
    uint64_t front_bytes;
    uint64_t seed; /* of the records' checksums */
    kvleaf_allocator allocator;
    void *parts[6]; /* what reading allocated */
} kvl_snapshot;

/* Bytes of a record of a group, its checksum apart, and of all records with theirs; false where 64 bits don't count
 * them.
 */
uint64_t kvl_snapshot_record_bytes(const kvl_snapshot *snapshot, int32_t group);
bool kvl_snapshot_records_bytes(const kvl_snapshot *snapshot, uint64_t *out);
/* The checksum of a front; returns the seed of its records' checksums. */
uint64_t kvl_snapshot_seal(const void *data, size_t size, unsigned char checksum[KVL_SNAPSHOT_CHECKSUM]);

/* Puts the front into `out`, which is empty, and sets bytes, front_bytes and seed. UNSUPPORTED: more bytes than 64 bits
 * count. NO_MEMORY. */
kvleaf_status kvl_snapshot_write_front(kvl_snapshot *snapshot, kvl_text *out);
/* The checksum that follows a record. */
void kvl_snapshot_checksum(const kvl_snapshot *snapshot, int32_t group, int32_t record, const void *data,
                           unsigned char checksum[KVL_SNAPSHOT_CHECKSUM]);

/* Where a snapshot is read from: a file, or memory. */
typedef struct kvl_snapshot_source {
    bool (*read)(void *user, uint64_t offset, void *data, size_t size);
    void *user;
    uint64_t size;
} kvl_snapshot_source;

/* Reads and verifies the front; *out is to be freed where this succeeds. CORRUPT: cut, altered, no snapshot, or one
 * that contradicts itself. UNSUPPORTED: of a later version. NO_MEMORY. */
kvleaf_status kvl_snapshot_read(const kvleaf_allocator *allocator, const kvl_snapshot_source *source,
                                kvl_snapshot *out);
/* Takes a zeroed one, too. */
void kvl_snapshot_free(kvl_snapshot *snapshot);
/* Reads a record with its checksum into data[record bytes + KVL_SNAPSHOT_CHECKSUM] and verifies it. CORRUPT. */
kvleaf_status kvl_snapshot_read_record(const kvl_snapshot *snapshot, const kvl_snapshot_source *source, int32_t group,
                                       int32_t record, void *data);
/* Verifies all records. CORRUPT, NO_MEMORY. */
kvleaf_status kvl_snapshot_verify(const kvl_snapshot *snapshot, const kvl_snapshot_source *source);

#endif
