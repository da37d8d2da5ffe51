/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_SNAPSHOT_H
#define KVLEAF_SNAPSHOT_H

/* Sequences, or the whole prefix cache, in one file: written by one process, read by another, on another device or in
 * another layout. The file holds geometry, dtypes, token ids, the chain of the index, and K and V in rows, with a
 * checksum (XXH3-128) a block and one over everything else. It is read whole and verified before anything changes. The
 * checksums find accidents, not an attacker.
 *
 * These calls wait for the device. Thread rule: as the cache's other calls. */

#include <kvleaf/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvleaf_snapshot_params {
    uint32_t struct_size;
    const kvleaf_seq *seqs;      /* [num_seqs]: their committed tokens are saved; shared blocks once */
    int32_t num_seqs;
    int32_t prefix_cache;        /* 1 = all that the prefix index finds, too */
} kvleaf_snapshot_params;

typedef struct kvleaf_snapshot_info {
    uint32_t struct_size;
    int32_t version;
    int32_t block_size, num_groups, num_layers;
    int32_t num_seqs;
    int64_t num_blocks;          /* with data, all groups together */
    int64_t num_indexed;         /* of the prefix index */
    uint64_t bytes;              /* of the file */
} kvleaf_snapshot_info;

/* Writes the file; beside it first, then renamed, so that readers see the old or the new one. INVALID: a path that
 * can't be written. BUSY: a sequence that is swapped out. FOREIGN, STALE, NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_snapshot_save(kvleaf_cache *cache, const char *path,
                                              const kvleaf_snapshot_params *params, const kvleaf_exec *exec);

/* Makes the file's sequences in the order in which they were saved, in seqs[capacity], *count of them, and puts its
 * prefix cache into the index (left aside where the cache has none). What shared blocks shares them again; what the
 * cache's index holds already is shared with it, not stored twice. All or nothing; cached blocks that were evicted for
 * a load that fails afterwards stay evicted. INVALID: a path that can't be read. CORRUPT: cut, altered, or no snapshot.
 * UNSUPPORTED: of a later version. FOREIGN: of another block size, layer table or dtype. TOO_SMALL: `capacity` (*count
 * is set), or max_sequences, or max_context. NO_BLOCKS. NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_snapshot_load(kvleaf_cache *cache, const char *path, kvleaf_seq *seqs,
                                              int32_t capacity, int32_t *count, const kvleaf_exec *exec);

/* Reads and verifies a file without a cache. As load: INVALID, CORRUPT, UNSUPPORTED. */
KVLEAF_API kvleaf_status kvleaf_snapshot_inspect(const char *path, kvleaf_snapshot_info *info);

#ifdef __cplusplus
}
#endif
#endif
